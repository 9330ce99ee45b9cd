"""What XLA compiles, with the shapes that it is compiled for."""

import logging
from typing import Any, NamedTuple, Self

# jax says there, at the level DEBUG, what it compiles; its record has name and shapes as arguments
LOGGER, MESSAGE = "jax._src.interpreters.pxla", "Compiling %s with global shapes and types %s"


class Program(NamedTuple):
    """Describe a jitted function, lowered for some arguments."""

    name: str
    shapes: tuple[str, ...]

    def described(self, before: "Program | None") -> str:
        """Return in words what differs from when the program was compiled last, if it was."""
        if before is None or len(before.shapes) != len(self.shapes):
            shown = ", ".join(self.shapes[-4:])
            return f"{self.name} for {len(self.shapes)} arguments, the last: {shown}"
        if before.shapes == self.shapes:
            return f"{self.name} for the same shapes: a static value or the function itself is new"
        pairs = enumerate(zip(self.shapes, before.shapes, strict=True))
        changed = [f"argument {i} is {now}, was {was}" for i, (now, was) in pairs if now != was]
        more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
        return f"{self.name}: {'; '.join(changed[:2])}{more}"


class Compilations(logging.Handler):
    """Note every program that is compiled while the block runs.

    Example: `with Compilations() as compilations: step(); compilations.programs[-1].name`.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.programs: list[Program] = []
        self._logger = logging.getLogger(LOGGER)

    def __enter__(self) -> Self:
        self._held = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._held[0])
        self._logger.propagate = self._held[1]

    def emit(self, record: logging.LogRecord) -> None:
        """Note the program of a record of jax's, if the record is about a compilation."""
        if str(record.msg).startswith(MESSAGE) and isinstance(record.args, tuple):
            name, shapes = record.args[:2]
            given: Any = shapes
            self.programs.append(Program(str(name), tuple(map(_short, given))))

    def last(self, name: str, before: int) -> Program | None:
        """Return the newest program of a name among the first `before`, or None."""
        return next((p for p in reversed(self.programs[:before]) if p.name == name), None)


def _short(shape: Any) -> str:
    found = getattr(shape, "str_short", None)
    return found() if found else str(shape)
