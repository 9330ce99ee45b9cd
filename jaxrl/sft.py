"""Fine-tune on conversations, supervised: only what the assistant says is imitated.

    python -m jaxrl.sft --config=configs/sft_addition.py --config.trainer.seed=1

One step is one optimizer update on `trainer.train_batch_size` conversations. Model, update,
sharding, packing, adapters, checkpoints and exports are those of `jaxrl.train`. docs/sft.md says
which fields of docs/configuration.md are read.
"""

from jaxrl import cli, config as cfg

if __name__ == "__main__":
    cli.answer_early(__doc__, cfg.read_early)

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import activity
from jaxrl.config.dataclass_config import flatten
from jaxrl.config.microbatching import update_microbatching
from jaxrl.config.model_limits import check_ids, check_tokens, warn_of_positions
from jaxrl.config.platform_defaults import settle
from jaxrl.data.conversations import Conversation, conversation_batch, load_conversations
from jaxrl.data.order import order_of_run
from jaxrl.data.packing import empty_batch, round_up
from jaxrl.data.prompts import check_files
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.files import FolderError, writable_folder
from jaxrl.hub import check_folder
from jaxrl.models import hf
from jaxrl.models.adapter import AdaptedModel, check_packing
from jaxrl.models.transformer import Params, TransformerConfig
from jaxrl.parallel import (
    allgather,
    is_first,
    make_mesh,
    put,
    record_folder,
    replicated,
    same_in_all,
    watchdog,
)
from jaxrl.parallel.checksums import checksums
from jaxrl.parallel.compilation import CompilationWatch, enable_cache
from jaxrl.parallel.devices import check_devices
from jaxrl.parallel.offload import on_device
from jaxrl.parallel.processes import joined_main
from jaxrl.parallel.rules import batch_devices
from jaxrl.records.checkpoint import (
    Checkpointer,
    CheckpointError,
    UnreadableCheckpoint,
    recorded_settings,
    resume,
    where_it_resumes,
)
from jaxrl.records.display import Display, display_of
from jaxrl.records.loggers import check_installed
from jaxrl.records.resume_identity import fingerprint
from jaxrl.records.run_folders import RunFolders
from jaxrl.records.run_logger import RunLogger
from jaxrl.signals import Ended, Ending
from jaxrl.training.build import assemble_policy, assemble_update
from jaxrl.training.objective import step_metrics
from jaxrl.training.optim import init_state
from jaxrl.training.update import every_way
from jaxrl.types import TrainBatch, TrainState

CURVES = (("train/loss", "training"), ("eval/loss", "evaluation"))
# of the update, under the names of SkyRL's supervised trainer
NAMES = {
    "policy/final_loss": "train/loss",
    "policy/grad_norm": "train/grad_norm",
    "policy/policy_lr": "train/lr",
    "policy/policy_entropy": "train/entropy",
    "policy/skipped_updates": "train/skipped_updates",
}


class SFTTrainer:
    """Run the supervised loop.

    Args:
        config: resolved by `resolve_sft` and validated.
        tokenizer: of the policy.
        model: its architecture.
        mesh: devices.
        train_data, eval_data: tokenised conversations; no evaluation without the latter.
        display: what a person sees of the run.

    Raises:
        ValueError: fewer conversations than a batch, or rows that cannot hold the longest.
    """

    def __init__(
        self,
        config: cfg.TrainConfig,
        *,
        tokenizer: Any,
        model: TransformerConfig | AdaptedModel,
        mesh: jax.sharding.Mesh,
        train_data: Sequence[Conversation],
        eval_data: Sequence[Conversation],
        display: Display,
    ) -> None:
        self.config, self.tokenizer, self.model, self.mesh = config, tokenizer, model, mesh
        self.train_data, self.eval_data = train_data, eval_data
        trainer = config.trainer
        self.order = order_of_run(config, train_data)
        if isinstance(model, AdaptedModel) and trainer.hf_save_interval > 0:
            raise ValueError(
                f"trainer.hf_save_interval={trainer.hf_save_interval}: {model.name} has no Hugging "
                "Face form; set it to -1"
            )
        self.lengths = [len(c.tokens) for c in (*train_data, *eval_data)]
        cfg.check_lengths(config, mesh.size, max(self.lengths))
        self.steps_per_epoch = self.order.batches_per_epoch
        self.total_steps = trainer.epochs * self.steps_per_epoch
        if trainer.max_training_steps is not None:
            self.total_steps = min(self.total_steps, trainer.max_training_steps)
        self.folders: RunFolders | None = None  # held; None: `train` takes them
        self.display = display
        self.state: TrainState
        self.saved = 0  # the last step with a checkpoint of this process
        self.logger: RunLogger
        self._build()

    def _build(self) -> None:
        """Make everything that is compiled or placed once."""
        trainer = self.config.trainer
        self.policy, self.forward_pass = assemble_policy(self.config, self.model, self.mesh)
        if trainer.hf_save_interval > 0:
            self.policy.check_export()
        placement = self.policy.placement
        self.optimizer, self.abstract_state, self.updater = assemble_update(
            self.config, self.forward_pass, placement, self.total_steps, self.policy.trained
        )
        groups, longest = batch_devices(self.mesh, placement.rules), max(self.lengths)
        parts = placement.size(placement.rules.seq)
        cut = update_microbatching(self.config, groups, longest=longest, context=parts)
        sharing = self.forward_pass.microbatching.sharing
        self.updater.microbatching = dataclasses.replace(cut, sharing=sharing)
        self.eval_cut = dataclasses.replace(
            self.forward_pass.microbatching,
            total=round_up(trainer.eval_batch_size, groups),
            widths=self.updater.microbatching.widths,
            sharing=None,  # a loss of conversations that have little in common
        )
        writable_folder("trainer.log_path", cfg.run_folder(trainer))
        writable_folder("trainer.export_path", trainer.export_path)
        self.checkpointer = Checkpointer(trainer.ckpt_path, max_to_keep=trainer.max_ckpts_to_keep)
        self.meta = {
            "config": cfg.get_config_as_dict(self.config),
            "mesh": dict(self.mesh.shape),
            "total_steps": self.total_steps,
            "data": fingerprint(self.train_data),
            "functions": {},
        }

    @property
    def params(self) -> Params:
        """Return all parameters of the policy, on its devices; adapters are on their base."""
        return on_device(self.policy.whole(self.state.params))

    # ---------------------------------------------------------------- the loop

    def train(self) -> TrainState:
        """Train from the newest checkpoint, or from the start, to the last step.

        Raises:
            signals.Ended: SIGTERM or Ctrl-C has ended it after a step.
        """
        trainer = self.config.trainer
        self.state = self.updater.offload(self.restore_or_init())
        if trainer.use_sample_packing is True and isinstance(self.model, AdaptedModel):
            check_packing(self.model, self.params)
        first, folder = int(self.state.step), record_folder(cfg.run_folder(trainer))
        if self.folders is None or self.folders.closed:
            self.folders = RunFolders(self.config)
        folders = self.folders
        folders.own(first)
        self.checkpointer.on_commit = folders.saved
        self.logger = RunLogger(
            folder,
            cfg.logger_names(trainer.logger) if is_first() else [],
            first,
            config=cfg.get_config_as_dict(self.config),
            project=trainer.project_name,
            run_name=trainer.run_name,
            curves=CURVES,
            ylabel="loss per token",
            read=lambda line: self.display.course.read(int(line["step"]), line),
        )
        if first >= self.total_steps:
            activity.say(cfg.nothing_to_do(trainer, first, self.total_steps))
        self.display.course.begin(first, self.total_steps)
        with (
            contextlib.ExitStack() as ended,
            watchdog.watched(trainer.cluster.stall_seconds, 0.0),
            CompilationWatch(warm_after=first + 1) as self.watch,
            contextlib.closing(self),
            contextlib.closing(self.logger),
            self.display,
            contextlib.closing(self.checkpointer),  # waits for the save under way, come what may
        ):
            if first < self.total_steps:
                self.warm_up()
            if first == 0 and trainer.eval_before_train and trainer.eval_interval > 0:
                self.record(0, self.evaluate())
            step, number, saves = first, None, trainer.ckpt_interval > 0
            ending = ended.enter_context(Ending(first + 1, self.total_steps, saves=saves))
            for step in range(first + 1, self.total_steps + 1):
                folders.refuse_if_lost()
                activity.begin_step(step)
                with activity.phase("policy_train"):
                    metrics = self.train_step(step)
                if self._due(step, trainer.eval_interval):
                    metrics |= self.evaluate()
                self.record(step, metrics)
                self.save(step)
                told = allgather(ending.asked_by(step))
                if number := next(filter(None, told), None):
                    if saves and self.saved < step:
                        self._write(step, exports=False, saves=True)
                    break
            self.logger.plot()
            with activity.phase("save_checkpoints"), activity.doing("the last save"):
                self.checkpointer.wait()
        ending.leave(step, number)
        return self.state

    def train_step(self, step: int) -> dict[str, float]:
        """Make one optimizer update on one batch; return its metrics."""
        started = time.perf_counter()
        batch = self.next_batch(step)
        key = jax.random.fold_in(jax.random.key(self.config.trainer.seed), step)
        weights, _ = self.updater.weights(batch)
        params = self.policy.whole(self.state.params)
        self.state, parts, applied = self.updater.update(self.state, batch, weights, key, params)
        metrics = step_metrics([(parts, applied)])
        numbers = {"step": np.int32(step), "batches_drawn": np.int32(step)}
        self.state = self.state.replace(**put(numbers, self.abstract_state.step.sharding))
        if metrics["policy/skipped_updates"]:
            activity.warn(f"step {step}: the update was skipped, its gradient was not finite")
        seconds = time.perf_counter() - started
        tokens, rows = int(batch.lengths.sum()), len(batch.lengths)
        return {ours: metrics[name] for name, ours in NAMES.items()} | {
            "train/actual_num_tokens": tokens,
            "train/trained_tokens": int(batch.loss_mask.sum()),
            "train/batch_num_seq": rows,
            "train/tokens_per_second": tokens / seconds,
            "train/tokens_per_second_per_gpu": tokens / seconds / self.mesh.size,
            "timing/step": seconds,
            **self.updater.cut_metrics([batch]),
            "trainer/global_step": step,
            "trainer/epoch": (step - 1) // self.steps_per_epoch,
            **self.order.metrics(step),
        }

    def next_batch(self, step: int) -> TrainBatch:
        """Return the batch of a step, a function of the seed and the step alone.

        Every epoch reshuffles; its last, incomplete batch is left out.
        """
        rows = [self.train_data[i] for i in self.order.batch(step - 1)]
        return conversation_batch(rows, self.eval_cut.batch_width)

    def evaluate(self) -> dict[str, float]:
        """Measure the loss per imitated token over all evaluation conversations."""
        if not self.eval_data:
            return {}
        started, size = time.perf_counter(), self.config.trainer.eval_batch_size
        loss, tokens = 0.0, 0
        with activity.phase("eval"), activity.doing("evaluating", len(self.eval_data)) as done:
            for first in range(0, len(self.eval_data), size):
                rows = self.eval_data[first : first + size]
                batch = conversation_batch(rows, self.eval_cut.batch_width)
                log_probs, _ = self.forward_pass(self.params, batch, microbatching=self.eval_cut)
                loss -= float(np.sum(log_probs * batch.loss_mask, dtype=np.float64))
                tokens += int(batch.loss_mask.sum())
                done.done += len(rows)
        return {
            "eval/loss": loss / tokens,
            "eval/trained_tokens": tokens,
            "timing/eval": time.perf_counter() - started,
        }

    def warm_up(self) -> None:
        """Compile what the steps and evaluations will run, all but the optimizer's own update."""
        started, settings = time.perf_counter(), self.config.trainer
        widths = self.eval_cut.batch_widths(min(self.lengths), max(self.lengths))
        with activity.doing("compiling", len(widths)) as compiling:
            for width in widths:
                compiling.next(f"rows of {width} tokens")
                length = min(width, settings.packed_length or width)
                empty = empty_batch(settings.train_batch_size, width, length, log_probs=False)
                with every_way([self.updater], width) as ways:
                    for _ in ways:
                        self.updater.warm_up(self.params, empty)
                for rows in self.eval_cut.batch_sizes(length) if self.eval_data else ():
                    empty = empty_batch(rows, width, length, log_probs=False)
                    self.forward_pass(self.params, empty, microbatching=self.eval_cut)
        checksums(self.state)  # as a save does
        activity.say(f"rows of {widths} tokens; compiled in {time.perf_counter() - started:.1f} s")

    # ---------------------------------------------------------------- what is kept

    def restore_or_init(self) -> TrainState:
        """Return the state of the checkpoint that the config points to, else the model folder's."""
        trainer = self.config.trainer
        self.policy.load_base()
        self.meta["model"] = self.policy.describe()
        mode, path = trainer.resume_mode, trainer.resume_path
        state = resume(self.checkpointer, mode, path, self.abstract_state, self.meta)
        if state is not None:
            activity.say(f"resuming after step {int(state.step)}")
            return state
        return init_state(
            self.optimizer,
            self.policy.initial(),
            jax.tree.map(lambda x: x.sharding, self.abstract_state.params),
            replicated(self.mesh),
        )

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write the numbers of a step, and what was compiled since the last."""
        logs = metrics | self.watch.metrics(step)
        self.logger.log(step, logs)
        self.display.stepped(step, logs)

    def save(self, step: int) -> None:
        """Export and checkpoint when they are due: by interval, at epoch ends, after the last."""
        trainer = self.config.trainer
        epoch_end = step % self.steps_per_epoch == 0
        exports = self._due(step, trainer.hf_save_interval)
        saves = self._due(step, trainer.ckpt_interval) or (epoch_end and trainer.ckpt_interval > 0)
        if exports or saves:
            self._write(step, exports=exports, saves=saves)

    def _write(self, step: int, *, exports: bool, saves: bool) -> None:
        if self.folders:
            self.folders.check()
        if exports:
            with activity.phase("save_hf_model"):
                folder = Path(self.config.trainer.export_path) / f"global_step_{step}"
                self.export(folder / "policy")
        if saves:
            self.logger.plot()
            self.logger.flush()
            # last: a resumed run goes on here
            with activity.phase("save_checkpoints"), activity.doing(f"saving step {step}"):
                self.checkpointer.save(step, self.state, self.meta)
            self.saved = step

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, or its adapters as a PEFT folder."""
        self.policy.export(folder, self.state.params, self.tokenizer)
        activity.say(f"exported the policy to {folder}")

    def close(self) -> None:
        """Let go of the folders of the run."""
        if self.folders:
            self.folders.close()

    def _due(self, step: int, interval: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == self.total_steps)


def build(config: Any) -> SFTTrainer:
    """Hold the folders of the run, load everything, print what will be done.

    `train` lets go of the folders; without it, `close`.

    Args:
        config: a `TrainConfig`, `ml_collections.ConfigDict` or nested dict.

    Raises:
        ValueError: the config, a data file, the model folder or a checkpoint is wrong; no earlier
            result was touched.
    """
    check_devices()
    unresolved = cfg.to_train_config(config)
    cfg.validate_sft(unresolved, num_devices=jax.device_count(), num_processes=jax.process_count())
    config = cfg.resolve_sft(unresolved)
    same_in_all("configs", flatten(config))
    config, chosen = settle(config, recorded=recorded_settings(config.trainer))
    check_installed(cfg.logger_names(config.trainer.logger))
    enable_cache(config.trainer.compilation_cache_path)
    folders = RunFolders(config)
    try:
        trainer = _load_all(config, chosen)
    except BaseException:
        folders.close()
        raise
    trainer.folders = folders
    return trainer


def _load_all(config: cfg.TrainConfig, chosen: Any) -> SFTTrainer:
    watched = config.trainer
    display = display_of(  # before the data are loaded, which says how many there are
        watched.run_name,
        watched.watching.display,
        shown=is_first() and "console" in cfg.logger_names(watched.logger),
    )
    evaluated = config.trainer.eval_interval > 0
    check_files([*config.data.train_data, *(config.data.val_data if evaluated else ())])
    role, template = config.trainer.policy, config.generator.chat_template
    overrides = cfg.model_overrides(config.trainer, role)
    path = role.model.path or ""  # validated
    check_folder("trainer.policy.model.path", path)
    model = hf.load_config(path, overrides, random_init=role.model.random_init)
    tokenizer = load_tokenizer(path, template.name_or_path if template.source == "file" else None)
    ends = hf.eos_sources(path)
    check_ids("trainer.policy.model.path", path, model.vocab_size, tokenizer, ends)
    mesh, data = make_mesh(**dataclasses.asdict(role.mesh)), config.data
    train_data = _load(config, tokenizer, data.train_data)
    eval_data = _load(config, tokenizer, data.val_data if evaluated else [])
    check_tokens("data.train_data", data.train_data, train_data, model.vocab_size)
    check_tokens("data.val_data", data.val_data, eval_data, model.vocab_size)
    trainer = SFTTrainer(
        config,
        tokenizer=tokenizer,
        model=model,
        mesh=mesh,
        train_data=train_data,
        eval_data=eval_data,
        display=display,
    )
    warn_of_positions(
        "sft.max_length",
        config.sft.max_length,
        "the longest conversation has",
        max(trainer.lengths),
        hf.max_positions(path),
        path,
    )
    lines = [*chosen, *(f"kernel: {choice}" for choice in trainer.forward_pass.kernels)]
    card = cfg.sft_card(config, mesh.size, max(trainer.lengths), lines)
    trainer.display.card(card, lambda width: card)
    activity.say(f"trained: {trainer.policy.size()}")
    activity.detail(f"mesh {dict(mesh.shape)} of {jax.default_backend()}")
    activity.say(f"run folder {cfg.run_folder(config.trainer)}")
    print_example(tokenizer, trainer.train_data[0])
    return trainer


def _load(config: cfg.TrainConfig, tokenizer: Any, sources: Sequence[str]) -> list[Conversation]:
    if not sources:
        return []
    stops = {tokenizer.eos_token_id, *hf.eos_token_ids(config.trainer.policy.model.path or "")}
    found, counts = load_conversations(
        sources,
        tokenizer,
        **dataclasses.asdict(config.sft),
        stop_token_ids=stops,
        chat_template_kwargs=config.generator.chat_template_kwargs,
    )
    noted = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    activity.say(f"{len(found)} conversations from {', '.join(sources)}{noted and f'; {noted}'}")
    imitated = [itertools.compress(c.tokens, c.loss_mask) for c in found]
    endless = sum(stops.isdisjoint(tokens) for tokens in imitated)
    if endless:
        activity.warn(
            f"{endless} of them end no turn with {sorted(stops)}: stopping is not learnt there"
        )
    return found


def print_example(tokenizer: Any, conversation: Conversation) -> None:
    """Show a conversation as the model sees it, with [[ ]] around what is imitated."""
    mask = np.array(conversation.loss_mask)
    cuts = np.flatnonzero(np.diff(mask)) + 1
    parts = np.split(np.array(conversation.tokens), cuts)
    texts = [tokenizer.decode(part) for part in parts]
    imitated = [bool(mask[start]) for start in (0, *cuts)]
    pairs = zip(texts, imitated, strict=True)
    activity.say("".join(f"[[{text}]]" if loud else text for text, loud in pairs))


def sft(config: Any) -> SFTTrainer:
    """Run a config to the end; see `build`.

    Returns:
        The trainer: `.state` holds the parameters, `.config` what was resolved.
    """
    with contextlib.closing(build(config)) as trainer:
        trainer.train()
    return trainer


@cli.command(__doc__, mendable=())  # of those of the training some keep their traceback
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.sft [--distributed] --config=FILE [--config.a.b=value ...]`."""
    try:
        trainer = build(cfg.read_command_line(argv))
    except cli.MENDABLE as error:
        return cli.refuse(error)
    try:
        trainer.train()
    except Ended as ended:
        return cli.ended(str(ended), where_it_resumes(trainer.config.trainer), ended.status)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(where_it_resumes(trainer.config.trainer)) from error
    except (CheckpointError, FolderError) as error:
        cli.refuse(error)
        return cli.CRASHED if isinstance(error, UnreadableCheckpoint) else cli.REFUSED
    return cli.DONE


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
