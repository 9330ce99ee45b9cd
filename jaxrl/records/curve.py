"""A curve of a run of any length, in memory that does not grow with it."""

from dataclasses import dataclass, field

MOST = 4000  # points; an even number


@dataclass
class Curve:
    """Hold a metric over the steps: all points, or of more than `MOST` evenly spaced ones.

    Attributes:
        points: steps and values, the last one among them.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    _every: int = 1  # of those added, one is kept
    _added: int = 0

    def add(self, step: int, value: float) -> None:
        """Add a point; the last one stood only until the next if it is none of those kept."""
        if self._added and (self._added - 1) % self._every:
            self.points[-1] = step, value
        else:
            self.points.append((step, value))
        self._added += 1
        if len(self.points) > MOST:
            self.points = self.points[::2]  # another thread may draw the old ones
            self._every *= 2
