"""An engine that says what a table tells it to, and the pieces around it."""

from concurrent.futures import Future

from jaxrl.config import GeneratorConfig
from jaxrl.data.tokenizer import encode_prompt
from jaxrl.envs import Env
from jaxrl.rollout.conversations.conversation import ConversationGenerator, sample_key
from jaxrl.rollout.generator import generate_now
from jaxrl.rollout.protocol import Completion, Sampling
from jaxrl.types import Prompt


class ScriptedEngine:
    """Answers a request with `reply(prompt_tokens, key)`: a Completion, or its token ids.

    Token i of a turn has log-prob -(i + 1) / 8. Ids that end with a stop token stopped, others were
    cut off. `calls` has the requests of each call of `submit`.
    """

    def __init__(self, reply):
        self.reply, self.calls = reply, []

    def submit(self, requests):
        self.calls.append(list(requests))
        return [[self._future(request, key) for key in request.keys] for request in requests]

    def _future(self, request, key):
        said = self.reply(request.prompt_tokens, key)
        if not isinstance(said, Completion):
            stopped = said[-1] in request.sampling.stop_token_ids
            said = completion(said, "stop" if stopped else "length")
        future = Future()
        future.set_result(said)
        return future


def completion(tokens, stop_reason, **rest):
    log_probs = [-(i + 1) / 8 for i in range(len(tokens))]
    return Completion(list(tokens), log_probs, stop_reason, [7] * len(tokens), **rest)


class TalkingEnv(Env):
    """Says what the row's `says` lists, one message a turn; turn n earns n."""

    closed: list = []

    def step(self, action):
        said = self.extras["says"][self.turns]
        self.turns += 1
        observations = [] if said is None else [{"role": "user", "content": said}]
        done = self.turns == len(self.extras["says"])
        reward = float(self.turns)
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}

    def get_metrics(self):
        return {"answered": self.turns}

    def close(self):
        self.closed.append(self.extras["says"])


def make_prompt(tokenizer, text="3142", uid="0:p", env_class=f"{__name__}:TalkingEnv", **extras):
    messages = [{"role": "user", "content": text}]
    tokens = tuple(encode_prompt(tokenizer, messages))
    return Prompt(uid=uid, messages=messages, tokens=tokens, env_class=env_class, extras=extras)


def converse(reply, prompts, tokenizer, *, stop_ids=None, stop=(), engine=None, **options):
    """The output for prompts, one trajectory each; settings of GeneratorConfig as keywords."""
    pool = {k: options.pop(k) for k in ("max_env_workers", "env_timeout_seconds") if k in options}
    settings = GeneratorConfig(**{"max_turns": 5, **options})
    engine = engine or ScriptedEngine(reply)
    generator = ConversationGenerator(engine, tokenizer, settings, **{"max_env_workers": 4, **pool})
    sampling = Sampling(8, stop_token_ids=stop_ids or (tokenizer.eos_token_id,), stop=stop)
    keys = [sample_key("test", i) for i in range(len(prompts))]
    return generate_now(generator, {"prompts": prompts, "keys": keys, "sampling": sampling})


class TwiceEnv(TalkingEnv):
    """Says everything in two messages."""

    def step(self, action):
        step = super().step(action)
        return {**step, "observations": step["observations"] * 2}
