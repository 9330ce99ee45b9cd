"""A batch that the processes of a job sample together."""

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import jax

from jaxrl.data.columns import NO_ROUTES, ROUTES, ROUTES_PROCESS
from jaxrl.models.transformer import Params
from jaxrl.parallel import allgather, is_first, local_slice
from jaxrl.rollout.conversations.concat_outputs import concat_batch, concat_outputs
from jaxrl.rollout.protocol import Completion, Request
from jaxrl.types import GeneratorOutput, Prompt

Sample = Callable[[Sequence[Prompt], bool], GeneratorOutput]  # (prompts, whether a part of a batch)


def sample_across_processes(
    sample: Sample,
    prompts: Sequence[Prompt],
    *,
    each_samples: bool,
    hosts: int = 1,
    phase: AbstractContextManager[bool] | None = None,
    part: bool = False,
) -> GeneratorOutput:
    """Sample the trajectories of a batch, the same in every process; a collective.

    Which process samples a prompt changes nothing: all that is random has a name. The experts of a
    token, which are most of what is known of it, stay with the process that sampled it: the column
    `expert_indices_process` says which that is.

    Args:
        each_samples: each process a share of the prompts; False = the first one all of them.
        hosts: neighbouring processes that have a share together, with one engine.
        phase: of that engine: whether this process samples on it; None = it does.
        part: this is not the whole batch, see `concat_batch`.

    Raises:
        Exception: what `sample` raised in any process, in all of them.
    """
    if jax.process_count() == 1:
        return sample(prompts, part)
    mine = local_slice(prompts, hosts) if each_samples else prompts if is_first() else ()
    output, error = None, None
    with phase or nullcontext(True) as samples:
        try:
            output = sample(mine, part or each_samples) if mine and samples else None
        except Exception as raised:  # the others wait
            error = raised
    parts, _ = exchanged(output, error)
    if not each_samples:
        return next(iter(parts.values()))
    return (concat_outputs if part else concat_batch)(list(parts.values()))


def exchanged(
    output: GeneratorOutput | None, error: Exception | None, about: Any = None
) -> tuple[dict[int, GeneratorOutput], list[Any]]:
    """Return what each process of the job has sampled, by process; a collective.

    Args:
        output: of this one; None = nothing.
        error: that it met.
        about: what else it tells; the second result has that of each.

    Raises:
        Exception: what any process met, in all of them.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return {} if output is None else {0: output}, [about]
    here = cast(dict[str, Any] | None, output)
    routes = here.get(ROUTES) if here else None
    sent = here and {name: x for name, x in here.items() if name != ROUTES}
    found = allgather((sent, routes is not None, error and _portable(error), about))
    for _, _, raised, _ in found:
        if raised is not None:
            raise raised
    parts = {process: part for process, (part, *_) in enumerate(found) if part is not None}
    if any(with_routes for _, with_routes, _, _ in found):
        for process, part in parts.items():
            rows = len(part["response_ids"])
            own = process == jax.process_index() and routes is not None
            column = routes if own else [NO_ROUTES] * rows
            parts[process] = part | {ROUTES: column, ROUTES_PROCESS: [process] * rows}
    return cast(dict[int, GeneratorOutput], parts), [about for *_, about in found]


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError of its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class AbsentEngine:
    """Stand in for the `Engine` in processes that do not sample, where the first one does."""

    def update_weights(self, params: Params, version: int) -> None:
        """Do nothing: the first process sends the weights."""

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Raise RuntimeError: this process does not sample."""
        raise RuntimeError("process 0 samples; this one has no engine")

    def submit(self, requests: Sequence[Request]) -> Any:
        """Raise RuntimeError: this process does not sample."""
        raise RuntimeError("process 0 samples; this one has no engine")

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Do nothing: process 0 compiles what its engine runs."""

    def describe(self) -> str:
        """Say where the samples come from."""
        return "none here, process 0 samples"

    def sleep(self) -> None:
        """Do nothing: no weights are held here."""

    def wake(self) -> None:
        """Do nothing: there is no engine to wake."""
