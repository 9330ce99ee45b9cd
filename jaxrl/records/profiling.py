"""Traces and device-memory profiles of chosen steps, in the run's folder.

profiles/traces                    read by xprof, TensorBoard's profile plugin and Perfetto
profiles/memory/step_<N>.prof      read by pprof
"""

from collections.abc import Collection
from pathlib import Path

import jax

from jaxrl import activity


class Profiler:
    """Records chosen steps of this process. What cannot be recorded is said, and the run goes on.

    Args:
        folder: of the run.
        trace_steps: are traced from their first operation to their last; neighbours together.
        memory_steps: have the device memory that is in use at their end written.
        every_memory: of every step.
    """

    def __init__(
        self,
        folder: Path,
        trace_steps: Collection[int] = (),
        memory_steps: Collection[int] = (),
        *,
        every_memory: bool = False,
    ) -> None:
        self.folder = folder / "profiles"
        self.trace_steps, self.memory_steps = trace_steps, memory_steps
        self.every_memory, self._tracing = every_memory, False

    def start(self, step: int) -> None:
        """Start a trace before a step, if the step is to be traced."""
        if step not in self.trace_steps or self._tracing:
            return
        try:
            jax.profiler.start_trace(self.folder / "traces")
            self._tracing = True
        except (OSError, RuntimeError) as error:  # another trace is under way, a full disk
            activity.warn(f"step {step} is not traced: {error}")

    def stop(self, step: int) -> None:
        """Stop the trace after a step, and write the memory profile of one that is to have it."""
        if step + 1 not in self.trace_steps:
            self.close()
        if not self.every_memory and step not in self.memory_steps:
            return
        path = self.folder / "memory" / f"step_{step}.prof"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            jax.profiler.save_device_memory_profile(path)
        except (OSError, RuntimeError) as error:
            self.every_memory, self.memory_steps = False, ()
            activity.warn(f"no memory profile of step {step}, and of none after it: {error}")

    def close(self) -> None:
        """End the trace under way."""
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            activity.warn(f"the trace could not be written: {error}")


def memory_metrics() -> dict[str, float]:
    """Return the most device memory used since the process began, of the fullest device, in GiB.

    Nothing where the backend does not count it, as on CPUs.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return {"trainer/peak_device_memory_gib": max(peaks) / 2**30} if peaks else {}
