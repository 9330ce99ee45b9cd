"""TensorBoard event files."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore


class TensorBoard:
    """An event file that hides what earlier files in `folder` hold after `finished_steps`.

    The events are written by the caller's thread: tensorboardX's `SummaryWriter` leaves them to
    another one, and its `flush` does not wait for it.
    """

    def __init__(self, folder: Path, finished_steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.events = EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        self.events.write_event(Event(step=finished_steps + 1, session_log=start))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self.events.write_event(event)

    def flush(self) -> None:
        """Everything logged so far is on disk."""
        self.events.flush()

    def close(self) -> None:
        """Close the file."""
        self.events.close()
