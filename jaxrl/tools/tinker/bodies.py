"""What clients may ask: the JSON of each call, and the protobuf of forward_backward.

Fields that a later SDK adds are refused unless they ask for nothing; see `Body`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxrl.rollout.server.errors import ApiError, refuse
from jaxrl.tools.tinker import tenants
from jaxrl.tools.tinker.losses import LOSSES
from jaxrl.tools.tinker.tiles import Datum
from jaxrl.tools.tinker.wire import tinker_pb2 as wire

DEFAULTS = tenants.Adam()
MOST_ALTERNATIVES = 20  # of a token, with their log-probs
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,200}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
Number = Annotated[int, Field(ge=0, le=2**62)]
Text = Annotated[str, Field(max_length=1000)]
Facts = Annotated[dict[str, Any], Field(max_length=64)]
Rate = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Body(BaseModel):
    """Hold the fields of one call; null is as if absent, and `type` says what it is anyway."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {k: x for k, x in raw.items() if x is not None and k != "type"}


class CreateSession(Body):
    """Hold the body of /create_session."""

    tags: list[Text] = []
    user_metadata: Facts = {}
    sdk_version: Text = ""
    project_id: Text = ""
    display_name: Text = ""


class OfSession(Body):
    """Hold a body that names a session alone."""

    session_id: Id


class Lora(Body):
    """Hold what is trained of a new model."""

    rank: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """Hold the body of /create_model."""

    session_id: Id
    model_seq_id: Number
    base_model: Text
    user_metadata: Facts = {}
    lora_config: Lora | None = None
    optimizer_config: dict[Literal["type"], Literal["adamw"]] = {"type": "adamw"}


class OfModel(Body):
    """Hold a body that names a model alone."""

    model_id: Id


class Adam(Body):
    """Hold the numbers of an update, with the defaults of `tenants.Adam`."""

    learning_rate: Rate = DEFAULTS.learning_rate
    beta1: Beta = DEFAULTS.beta1
    beta2: Beta = DEFAULTS.beta2
    eps: Rate = DEFAULTS.eps
    weight_decay: Rate = DEFAULTS.weight_decay
    grad_clip_norm: Annotated[float, Field(allow_inf_nan=False)] = DEFAULTS.grad_clip_norm


class OptimStep(Body):
    """Hold the body of /optim_step."""

    model_id: Id
    seq_id: Number
    adam_params: Adam


class SaveWeights(Body):
    """Hold the body of /save_weights."""

    model_id: Id
    seq_id: Number
    path: Name
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False
    user_metadata: Facts = {}


class SaveForSampler(Body):
    """Hold the body of /save_weights_for_sampler: a name, or the number of a sampler to open."""

    model_id: Id
    seq_id: Number
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: Facts = {}


class LoadWeights(Body):
    """Hold the body of /load_weights: into a model, or a new one of a session."""

    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Text | None = None
    user_metadata: Facts = {}
    path: Text
    optimizer: bool
    optimizer_config: dict[Literal["type"], Literal["adamw"]] = {"type": "adamw"}


class OpenSampler(Body):
    """Hold the body of /create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None


class OfSampler(Body):
    """Hold a body that names a sampler alone."""

    sampling_session_id: Id


class TextChunk(Body):
    """Hold tokens of a prompt."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Input(Body):
    """Hold a prompt."""

    chunks: list[TextChunk]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens of all chunks."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingParams(Body):
    """Hold how tokens are drawn."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Body):
    """Hold the body of /asample."""

    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: Input
    sampling_params: SamplingParams
    base_model: Text | None = None
    model_path: Text | None = None
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] = False


class Retrieve(Body):
    """Hold the body of /retrieve_future."""

    request_id: Id
    allow_metadata_only: bool = False


# ---------------------------------------------------------------- forward_backward

MOST_TARGETS = 128  # at one place
CUSTOM = "custom"  # a loss that a client has sent
_DTYPES = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
}


def parse_forward_backward(raw: bytes) -> wire.ForwardBackwardRequest:
    """Return the message in a body.

    Raises:
        ApiError: 400, it is none.
    """
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise ApiError(400, f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def loss_of(message: wire.ForwardBackwardRequest) -> tuple[str, dict[str, float]]:
    """Return the name of the loss, and its settings.

    Raises:
        ApiError: 400, there is no such loss, or it has no such setting.
    """
    if message.loss_fn not in LOSSES:
        refuse("loss_fn", message.loss_fn, f"must be one of {', '.join(LOSSES)}, {CUSTOM}")
    known = LOSSES[message.loss_fn].settings
    given = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            refuse(f"loss_fn_config[{name!r}]", value.text, "must be a number")
        given[name] = value.number
    for name, x in given.items():
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has no settings"
            refuse(f"loss_fn_config[{name!r}]", x, f"{message.loss_fn} {has}")
        if not 0 <= x <= 1e6:
            refuse(f"loss_fn_config[{name!r}]", x, "must be from 0 to 1e6")
    return message.loss_fn, given


def custom_of(message: wire.ForwardBackwardRequest) -> str:
    """Return the name of the loss that a client has sent before."""
    given = dict(message.loss_fn_config_v2)
    if list(given) != ["loss_id"] or given["loss_id"].WhichOneof("value") != "text":
        refuse("loss_fn_config", list(given), "must be loss_id alone, of a loss that was created")
    return given["loss_id"].text


def data_of(
    message: wire.ForwardBackwardRequest, names: Mapping[str, int], vocabulary: int, longest: int
) -> list[Datum]:
    """Return the data of a call.

    Args:
        names: inputs of the loss, with their dims: 1 = a number for each token, 0 = one number.

    Raises:
        ApiError: 400, names the datum, the field, the value and the fix.
    """
    if not message.data:
        refuse("data", [], "must hold at least one datum")
    return [
        _datum(f"data[{n}]", datum, names, vocabulary, longest)
        for n, datum in enumerate(message.data)
    ]


def _datum(
    at: str, datum: wire.Datum, names: Mapping[str, int], vocabulary: int, longest: int
) -> Datum:
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            refuse(f"{at}.model_input", kind, "this model reads text alone")
    raw = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    if len(raw) % 4:
        refuse(f"{at}.model_input", len(raw), "bytes are no whole int32 numbers")
    tokens = np.frombuffer(raw, "<i4")
    if not 1 <= len(tokens) <= longest:
        refuse(f"{at}.model_input", len(tokens), f"tokens must be from 1 to {longest}")
    targets = _array(at, "target_tokens", datum.loss_fn_inputs, len(tokens))
    for name, ids in (("model_input", tokens), ("loss_fn_inputs['target_tokens']", targets)):
        if ids.dtype.kind != "i" or wrong(ids, vocabulary):
            refuse(f"{at}.{name}", ids.flat[:8].tolist(), f"ids must be from 0 to {vocabulary - 1}")
    if targets.ndim > 1 and list(names) != ["weights"]:
        refuse(f"{at}.loss_fn_inputs['target_tokens']", targets.shape, "only cross_entropy takes 2")
    inputs = {}
    for name, rank in names.items():
        if name == "weights" and name not in datum.loss_fn_inputs:
            inputs[name] = np.ones(targets.shape, np.float32)
            continue
        size = len(tokens) if rank else 1
        values = _array(at, name, datum.loss_fn_inputs, size).astype(np.float32)
        if not np.isfinite(values).all():
            refuse(f"{at}.loss_fn_inputs[{name!r}]", values.flat[:8].tolist(), "must be finite")
        if name == "weights" and values.shape != targets.shape:
            refuse(f"{at}.loss_fn_inputs[{name!r}]", values.shape, f"must be {targets.shape}")
        if rank and name != "weights" and values.ndim > 1:
            refuse(f"{at}.loss_fn_inputs[{name!r}]", values.shape, "must have one number a token")
        inputs[name] = values if rank else values.reshape(())
    return Datum(tokens, targets.astype(np.int32), inputs)


def wrong(ids: Any, vocabulary: int) -> bool:
    """Return whether some id is none of the vocabulary."""
    ids = np.asarray(ids)
    return bool(((ids < 0) | (ids >= vocabulary)).any())


def _array(at: str, name: str, tensors: Mapping[str, wire.Tensor], length: int) -> np.ndarray:
    """Return a tensor of a datum, [length] or [length, K], K up to `MOST_TARGETS`."""
    field = f"{at}.loss_fn_inputs[{name!r}]"
    if name not in tensors:
        refuse(field, None, "is required by this loss")
    tensor = tensors[name]
    if tensor.dtype not in _DTYPES:
        refuse(field, tensor.dtype, "must be float32 or int64")
    kind, shape = _DTYPES[tensor.dtype], list(tensor.shape) or [length]
    fits = shape == [length] or (len(shape) == 2 and shape[0] == length)
    if not fits or not 1 <= shape[-1] <= max(length, MOST_TARGETS):
        refuse(
            field,
            list(tensor.shape),
            f"must have {length} numbers: one, or one for each token of model_input; or as many "
            f"rows of up to {MOST_TARGETS}",
        )
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _densified(field, tensor.sparse_csr, kind, shape)
    if len(tensor.dense) != math.prod(shape) * kind.itemsize:
        refuse(field, len(tensor.dense), f"bytes are not {math.prod(shape)} numbers")
    return np.frombuffer(tensor.dense, kind).reshape(shape)


def _densified(
    field: str, sparse: wire.SparseCsr, kind: np.dtype, shape: Sequence[int]
) -> np.ndarray:
    """Return a matrix of which what is not 0 is listed row by row."""
    parts = sparse.values, sparse.crow_indices, sparse.col_indices
    sizes = kind.itemsize, 8, 8
    if len(shape) != 2 or any(len(x) % size for x, size in zip(parts, sizes, strict=True)):
        refuse(field, list(shape), "is no sparse matrix")
    values = np.frombuffer(parts[0], kind)
    ends, columns = (np.frombuffer(x, "<i8") for x in parts[1:])
    right = len(ends) == shape[0] + 1 and len(values) == len(columns)
    right = right and ends[0] == 0 and ends[-1] == len(values) and (np.diff(ends) >= 0).all()
    if not right or wrong(columns, shape[1]):
        refuse(field, list(shape), "is no sparse matrix: its indices do not fit")
    found = np.zeros(shape, kind)
    found[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return found


# ---------------------------------------------------------------- results


def forward_backward_output(
    columns: Mapping[str, Sequence[np.ndarray]], metrics: Mapping[str, float]
) -> bytes:
    """Return the answer to a call: what each datum has in some columns, and numbers of all.

    Args:
        columns: by name, [T] of each datum, or [T, K].
    """
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    numbers = len(next(iter(columns.values())))
    shapes = [x.shape[1:] for x in next(iter(columns.values()))]
    firsts = [n for n in range(numbers) if not n or shapes[n] != shapes[n - 1]]
    for first, end in zip(firsts, [*firsts[1:], numbers], strict=True):  # of one shape each
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - first)
        for name, arrays in columns.items():
            some, field = arrays[first:end], record.fields[name]
            field.data = np.concatenate(some).astype("<f4").tobytes()
            field.offsets = np.cumsum([0, *(4 * x.size for x in some)]).astype("<i8").tobytes()
            field.dtype = wire.DTYPE_FLOAT32
            field.trailing_shape[:] = shapes[first]
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString(deterministic=True)
