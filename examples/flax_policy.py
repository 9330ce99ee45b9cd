"""A flax NNX module of your own as the policy: it trains on sort_digits.

    python examples/flax_policy.py --steps=20

Only `get_model` is overridden. The folder in `policy.model.path` gives the tokenizer; the sampler
recomputes the whole row for every token (`jaxrl/rollout/native/recompute.py`), because a module
that was not written for it has no key/value cache.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl import config as cfg
from jaxrl.models import AdaptedModel, adapt_nnx
from jaxrl.train import BasePPOExp

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.py"
VOCABULARY = 48  # of configs/tiny_char_model


class Block(nnx.Module):
    """Attention and an MLP, pre-norm."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class TinyTransformer(nnx.Module):
    """Learned positions, two blocks: tokens, positions, segment_ids [B, T] -> logits [B, T, V]."""

    def __init__(self, rngs: nnx.Rngs, width: int = 64) -> None:
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        same_segment = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        mask = same_segment & jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class FlaxPolicy(BasePPOExp):
    """A run whose policy is `TinyTransformer`."""

    def get_model(self) -> AdaptedModel:
        """The module, with random initial parameters drawn from `trainer.seed`."""
        return adapt_nnx(TinyTransformer)


def make_config(steps: int, folder: str) -> cfg.TrainConfig:
    """The quickstart, shorter, without the export that only Hugging Face families have."""
    return cfg.apply_overrides(
        cfg.load_config_file(str(QUICKSTART)),
        {
            "trainer.run_name": "flax_policy",
            "trainer.max_training_steps": steps,
            "trainer.hf_save_interval": -1,
            "trainer.log_path": folder,
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="runs", help="where results go")
    arguments = parser.parse_args()
    FlaxPolicy(make_config(arguments.steps, arguments.folder)).run()
