"""What passes between the parts of jaxrl.

Shape legend, used in every module: P prompts, B rows (trajectories), T tokens (prompt and response,
right padded), V vocabulary, K rewards. All [B, T] arrays are aligned to the predicted token:
`log_probs[b, t] = log p(tokens[b, t] | tokens[b, :t])`, so column 0 is always 0.

`FloatBT` and the like are annotations: which numbers an array holds, and its shape by this legend.
`jaxrl.array_ops` has them for the maths; `jaxrl.registry.contracts` reads them to check what a loss
or an estimator is called with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

from jaxrl.pytrees import PyTree

Array = Any  # a numpy array on the host, a jax.Array on devices
FloatBT = Annotated[Array, "float [B, T]"]  # float32, as every float here
MaskBT = Annotated[Array, "mask [B, T]"]  # float32, 0 or 1
IntBT = Annotated[Array, "int [B, T]"]  # int32, as every int here
IntB = Annotated[Array, "int [B]"]
FloatB = Annotated[Array, "float [B]"]
FloatBK = Annotated[Array, "float [B, K]"]
FloatK = Annotated[Array, "float [K]"]
BoolB = Annotated[Array, "bool [B]"]
IntRL = Annotated[Array, "int [R, L]"]
BoolRL = Annotated[Array, "bool [R, L]"]
IntScalar = Annotated[Array, "int []"]
FloatScalar = Annotated[Array, "float []"]
Message = dict[str, Any]  # {"role": "user", "content": "..."}
MOST_SEGMENTS = 16  # trajectories in a row of the model


class Earlier(NamedTuple):
    """Hold what is known of how a prompt was answered, which makes sampling faster, not other."""

    longest: int = 0  # tokens of the longest answer of its last epoch; 0 = not known
    answers: tuple[int, ...] = ()  # tokens of some of these, -1 between two
    guesses: bool = True  # an engine that guesses tokens is to do so


@dataclass(frozen=True)
class Prompt:
    """Hold one row of a data set, tokenised with the chat template.

    Example: `Prompt(uid="0:17", messages=[{"role": "user", "content": "3142"}], tokens=(3, 1, 4, 2,
    13), env_class="sort_digits", extras={"reward_spec": {"ground_truth": "1234"}})`.
    """

    uid: str
    messages: list[Message]
    tokens: tuple[int, ...]
    env_class: str
    extras: dict[str, Any] = field(default_factory=dict)
    # where the row was read, or what generated it; "": nobody knows
    file: str = field(default="", compare=False)
    # of a group that may go on in the next step: the samples that are asked for, by number, with
    # the `rollout.protocol.Completion` that each has so far; None: all samples, each to its end
    begun: Mapping[int, Any] | None = field(default=None, compare=False)
    earlier: Earlier = field(default=Earlier(), compare=False)

    @property
    def place(self) -> str:
        """Return how an error calls it: "prompt 0:17 (row 17 of train.jsonl, counted from 0)"."""
        row = self.uid.rpartition(":")[2]
        return f"prompt {self.uid}" + f" (row {row} of {self.file}, counted from 0)" * bool(
            self.file
        )

    @property
    def source(self) -> int:
        """Return its source's number in the config: 0 of uid "0:17", and of a uid without one."""
        number, colon, _ = self.uid.partition(":")
        return int(number) if colon and number.isdecimal() else 0


@dataclass
class Trajectory:
    """Hold one finished conversation.

    All lists but `prompt_tokens` have one entry per response token.

    Example: prompt "3142>" answered "1234<eos>", one reward per right position:
    `Trajectory(uid="0:17", prompt_tokens=[3, 1, 4, 2, 13], response_tokens=[1, 2, 3, 4, 40],
    loss_mask=[1, 1, 1, 1, 1], rollout_log_probs=[-0.1, -0.4, -0.2, -0.1, -0.3],
    rewards=[0.2, 0.2, 0.2, 0.2, 0.2], stop_reason="stop", policy_version=12)`.
    """

    uid: str
    prompt_tokens: list[int]
    response_tokens: list[int]
    loss_mask: list[int]  # 1 = sampled by the policy, 0 = observation
    rollout_log_probs: list[float]
    rewards: list[float] | float  # per token, or one number for the whole response
    stop_reason: str  # why the last turn ended: "stop", "length", "abort"; or "env_error"
    policy_version: int  # of the first sampled token, the older of its two; -1 if there is none
    env_class: str = ""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    reward_terms: dict[str, float] = field(default_factory=dict)  # unweighted, summed over turns
    env_seconds: float = 0.0  # waited for the environment
    failure: str = ""  # of the environment, where stop_reason is "env_error"
    rejudged: bool | None = None  # whether a second judgement gave the same; None: there was none
    turn_reward: float = 0.0  # of a row that is a turn: what it earned
    feedback: str = ""  # what the environment had to say of the answer, for the policy to read
    demonstrated: bool = False  # an answer of the data in place of a sampled one
    turns: list[tuple[int, int]] = field(default_factory=list)  # response tokens [first, last + 1)
    # see `rollout.protocol.Completion`
    sampling_mask_ids: list[tuple[int, ...]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the policy that drew it; -1 = given
    # the oldest that computed keys and values it was drawn from; -1 = given
    context_versions: list[int] = field(default_factory=list)
    routes: Array | None = None  # [n, Lx, k] of the first n tokens, of the prompt too
    steps: int = 0  # that drew the tokens, of an engine that guesses some


class TrajectoryID(NamedTuple):
    """Name which sample of which prompt a row belongs to."""

    instance_id: str  # the prompt's uid
    repetition_id: int


class GeneratorInput(TypedDict):
    """Say what to generate: one entry per trajectory, the samples of a prompt consecutive.

    Example, two samples of one prompt: `{"prompts": [p, p], "keys": [(7, 1), (7, 2)],
    "sampling": Sampling(max_tokens=8)}`.
    """

    prompts: list[Prompt]
    keys: list[tuple[int, int]]  # PRNG key data of each trajectory
    sampling: Any  # rollout.protocol.Sampling
    begun: NotRequired[list[Any]]  # what each trajectory has so far, see `Prompt.begun`
    trajectory_ids: NotRequired[list[TrajectoryID]]
    demonstrations: NotRequired[list[str | None]]  # what is answered; None = it is sampled
    part: NotRequired[bool]  # of a batch whose parts are sampled one by one; see `measured` below


class Measured(NamedTuple):
    """Hold what the metrics of a batch need of a trajectory beside its columns."""

    env_class: str
    env_metrics: dict[str, Any]
    env_seconds: float
    turns: list[tuple[int, int]]
    failure: str  # of its environment; "" = none
    rejudged: bool | None = None  # see `Trajectory`
    steps: int = 0


class GeneratorOutput(TypedDict):
    """Hold trajectories as columns, as `Trainer.postprocess_generator_output` sees them.

    A row is a trajectory; with `is_last_step` a step of one, its steps neighbours and in order. The
    reward of the last step is then that of the trajectory.

    Example: `{"prompt_token_ids": [[5, 13]], "response_ids": [[7, 40]], "rewards": [1.0],
    "loss_masks": [[1, 1]], "stop_reasons": ["stop"], "rollout_logprobs": [[-0.1, -0.2]], ...}`.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_logprobs: list[list[float]] | None  # None = the rollouts carry none
    policy_versions: list[int]
    rollout_metrics: dict[str, float]
    trajectory_ids: NotRequired[list[TrajectoryID]]
    is_last_step: NotRequired[list[bool]]
    turn_rewards: NotRequired[list[float]]  # with is_last_step: what each turn earned
    greedy_rewards: NotRequired[list[float]]  # what the greedy answer to each prompt earned
    feedback: NotRequired[list[str]]  # of the environment, in words; "" = it gave none
    demonstrated: NotRequired[list[bool]]  # answers of the data, of no policy's log-probs
    reward_terms: NotRequired[list[dict[str, float]]]  # by name, unweighted; {} = not judged
    kept: NotRequired[list[list[tuple[int, ...]]]]  # per token the ids it was drawn from, () = all
    token_versions: NotRequired[list[list[int]]]  # per token, of the policy that drew it; -1 = none
    valid_mask: NotRequired[list[bool]]  # False = masked by its generator: its environment failed
    context_versions: NotRequired[list[list[int]]]  # per token, the oldest in its context, or -1
    # [n, Lx, k] ids of the experts of the first n tokens of prompt and response, see `Completion`
    rollout_expert_indices: NotRequired[list[Array]]
    # of a job: the process that has these of a row, in the others they have n = 0
    expert_indices_process: NotRequired[list[int]]
    measured: NotRequired[list[Measured]]  # of parts, for the `rollout_metrics` of the batch
    ledger_ids: NotRequired[list[int]]  # of the trajectory in run.db


class TrainBatch(PyTree):
    """Hold one trajectory per row, right padded. Fields that a run does not need stay None.

    Example, T = 6: prompt "42>" (3 tokens), response "24<eos>":
    tokens [[4, 2, 13, 2, 4, 40]], response_mask = loss_mask [[0, 0, 0, 1, 1, 1]],
    rewards [[0, 0, 0, 1/3, 1/3, 1/3]], index [0], lengths [6].
    """

    tokens: IntBT
    lengths: IntB  # prompt and response
    response_mask: MaskBT  # response tokens including observations
    loss_mask: MaskBT  # tokens that the policy sampled
    rewards: FloatBT  # 0 outside response_mask
    rollout_log_probs: FloatBT | None  # 0 where not sampled
    index: IntB  # prompt group of the row
    policy_versions: IntB
    row_ids: IntB  # number of the row in its batch: names what a loss draws for it
    old_log_probs: FloatBT | None = None
    ref_log_probs: FloatBT | None = None
    values: FloatBT | None = None
    advantages: FloatBT | None = None
    returns: FloatBT | None = None
    is_last_step: BoolB | None = None  # until there are advantages; None = all are
    valid_mask: BoolB | None = None  # until there are advantages; 0 = nothing was judged
    # rewards by name, in alphabetical order, not weighted; until there are advantages
    reward_terms: FloatBK | None = None
    greedy_rewards: FloatB | None = None  # of each row's prompt; until there are advantages
    turn_rewards: FloatB | None = (
        None  # of rows that are turns: of each; until there are advantages
    )
    hints: Array | None = None  # [B, H] int32 tokens, then -1; until a teacher has read them
    kept: Array | None = None  # [B, T, k] int32 ids that a token was drawn from, then -1; see there
    token_versions: IntBT | None = None  # -1 where not sampled; None = not recorded
    context_versions: IntBT | None = None  # the oldest in a token's context
    demonstrated: BoolB | None = None  # answers of the data; None = all are sampled
    staleness: IntBT | None = None  # if the loss asks for it; see jaxrl/training/staleness.py
    # of a teacher: on which tokens it has a word; the ids it finds likeliest [B, T, K], -1 = none,
    # and its log-probs of them and of all others [B, T, K + 1]; or its last states [B, T, D]
    taught: MaskBT | None = None
    teacher_ids: Array | None = None
    teacher_log_probs: Array | None = None
    teacher_states: Array | None = None
    # [B, T, Lx, k] experts to replay, of which E or more are unknown; in a job `OwnRoutes`
    routes: Array | None = None


class ModelRows(PyTree):
    """Hold trajectories as the model's input: rows [R, L], several in one where packed.

    Segment 0 is padding. `source` says where in the rows, read row after row, each token of a batch
    [B, T] stands; another number >= R L for each that stands nowhere. None: the rows are the batch,
    one trajectory in each. Where rows are spread over devices their places are in the order of
    `parallel.context`, and each token knows the one that follows it: its target.

    Example, L = 6, a trajectory of 4 tokens and one of 2 in one row: segment_ids [[1, 1, 1, 1, 2,
    2]], positions [[0, 1, 2, 3, 0, 1]], source [[0, 1, 2, 3], [4, 5, 6, 7]].

    Rows of prefix trees (`data/prefix_trees.py`) have `ends`, `parents` and `asked`. There a token
    may have several that follow it, so each is its own target, given its parent.
    """

    tokens: IntRL
    positions: IntRL  # from 0 in every segment
    segment_ids: IntRL  # of trees 1 for every token
    targets: IntRL  # the next token in the row; of trees the token itself
    wanted: BoolRL  # targets whose log-prob is asked for; never the first of a segment
    source: IntBT | None = None
    keys: Array | None = None  # [R, L] PRNG keys for what drops out; None = nothing
    kept: Array | None = None  # [R, L, k] of the targets, as in TrainBatch
    teacher_ids: Array | None = None  # [R, L, K] of the targets
    teacher_log_probs: Array | None = None  # [R, L, K + 1]
    teacher_states: Array | None = None  # [R, L, D]
    teacher_head: Any = None  # weights of the teacher's head, by name; not of rows
    routes: Array | None = None  # [R, L, Lx, k], as in TrainBatch; in a job a `Share` of them
    ends: IntRL | None = None  # place in the row behind the last token that sees this one
    parents: IntRL | None = None  # place in the row of the token before this one; 0 for the first
    asked: Array | None = None  # [B, T] bool, whether the trajectory wants the token's log-prob


class CriticState(PyTree):
    """Hold what an update of the critic changes."""

    params: Any
    opt_state: Any
    skipped_updates: IntScalar  # updates skipped because the gradient was not finite


class TrainState(PyTree):
    """Hold everything that a step changes; it is saved whole in every checkpoint."""

    params: Any
    opt_state: Any
    step: IntScalar  # finished training steps
    skipped_updates: IntScalar  # updates skipped because the gradient was not finite
    kl_coef: FloatScalar  # coefficient of the KL in the reward
    batches_drawn: IntScalar  # batches of prompts; dynamic sampling draws several for a step
    critic: Any = None  # CriticState
    ref_params: Any = None  # of a moving reference: what is trained, as it was at an epoch's end
    algorithm_state: Any = None  # what authors keep between steps, by name; see `registry.memory`
