"""The order in which a run visits its rows: a function of seed and position, without any state.

One pool                                    Sources with weights, 3 : 1, in batches of 4
epoch 0: a permutation of all rows          batch 0: 3 of source 0, 1 of source 1, mixed
epoch 1: another                            batch 1: the next 3, the next 1
                                            each source begins anew, in another permutation, when
                                            it is used up, whatever the others do
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DataOrder:
    """Describe which rows make which batch.

    Batches are counted over all epochs, so a training step finds its rows from its number alone
    and a checkpoint needs no loader state. Of each pass over a source its last, incomplete batch is
    left out, so that no batch has a row twice.

    Example: 6 and 2 rows in batches of 3 + 1: `DataOrder(sizes=(6, 2), counts=(3, 1), seed=0)`.

    Args:
        sizes: rows of each source; they are numbered from 0 through all sources.
        counts: of them in a batch.
        seed: of the shuffling.
        shuffle: False = rows in the order of the sources, every epoch the same.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    seed: int
    shuffle: bool = True

    @property
    def batch_size(self) -> int:
        """Return the number of rows of a batch."""
        return sum(self.counts)

    @property
    def batches_per_epoch(self) -> int:
        """Return how many batches have as many rows as all sources have together."""
        return sum(self.sizes) // self.batch_size

    def batch(self, position: int) -> np.ndarray:
        """Return the rows of a batch [batch_size], as numbers through all sources.

        Args:
            position: number of the batch, from 0.
        """
        rows_of_sources, start = [], 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            epoch, batch = divmod(position, size // count)
            rows = np.arange(batch * count, (batch + 1) * count)
            if self.shuffle:
                rows = _permutation(size, self.seed, epoch, source)[rows]
            rows_of_sources.append(start + rows)
            start += size
        rows = np.concatenate(rows_of_sources)
        if len(rows_of_sources) > 1 and self.shuffle:
            # the third number of a pass is smaller
            rng_path = (self.seed, position, len(rows_of_sources))
            rows = np.random.default_rng(rng_path).permutation(rows)
        return rows

    def passes(self, batches: int) -> list[float]:
        """Return how often `batches` batches go through each source."""
        return [batches * count / size for size, count in zip(self.sizes, self.counts, strict=True)]

    def metrics(self, batches: int) -> dict[str, float]:
        """Return `passes` by source as metrics, where there are several."""
        passes = self.passes(batches) if len(self.counts) > 1 else []
        return {f"trainer/epochs_of_source_{i}": number for i, number in enumerate(passes)}


def order_of_run(config: Any, rows: Sequence[Any]) -> DataOrder:
    """Return the order in which a config visits rows, which have a `source`; see `data_order`."""
    trainer, data = config.trainer, config.data
    sources, how = [row.source for row in rows], (trainer.train_batch_size, trainer.seed)
    weights, shuffle = data.train_data_weights, data.shuffle
    return data_order(sources, *how, weights=weights, shuffle=shuffle)


def data_order(
    sources: Sequence[int],
    batch_size: int,
    seed: int,
    *,
    weights: Sequence[float] = (),
    shuffle: bool = True,
) -> DataOrder:
    """Return the order in which a run visits some rows.

    Args:
        sources: number of the source of each row, ascending; with weights.
        batch_size: rows per batch.
        seed: of the shuffling.
        weights: of each source, on any scale: its share of every batch, rounded to whole rows so
            that the batch is full (largest remainders first). () = one pool of all rows.
        shuffle: see `DataOrder`.

    Raises:
        ValueError: fewer rows than a batch takes, of all or of a source; a weight that comes to no
            row at all; with weights, sources that do not ascend or that have none.
    """
    sizes, counts = [len(sources)], [batch_size]
    if weights:
        _check_sources(sources, weights)
        sizes = np.bincount(np.asarray(sources, int), minlength=len(weights)).tolist()
        counts = proportional_counts(weights, batch_size)
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        of = f"source {source} of data.train_data" if weights else "the data"
        if weights and count == 0:
            raise ValueError(
                f"data.train_data_weights={list(weights)}: {of} comes to no row of a batch of "
                f"{batch_size} (trainer.train_batch_size); raise its weight or the batch size, or "
                "leave it out"
            )
        if not 0 < count <= size:
            raise ValueError(
                f"a batch takes {count} rows of {of}, which has {size}; trainer.train_batch_size="
                f"{batch_size} must be at least 1 and at most what the data can fill"
            )
    return DataOrder(tuple(sizes), tuple(counts), seed, shuffle)


def _check_sources(sources: Sequence[int], weights: Sequence[float]) -> None:
    """Refuse sources that do not ascend or that have no weight.

    A `get_prompts` of one's own may sort its rows, or number them as it likes.
    """
    field, rule = f"data.train_data_weights={list(weights)}", "a row's source is the number before "
    rule += "':' in its uid; leave the rows in the order of data.train_data, or the weights out"
    for row, (before, source) in enumerate(zip((0, *sources), sources, strict=False)):
        if source < before:
            where = f"row {row} is of source {source} and follows one of source {before}"
            raise ValueError(f"{field}: {where}; {rule}")
        if source >= len(weights):
            raise ValueError(f"{field}: row {row} is of source {source}, which has none; {rule}")


@functools.lru_cache(maxsize=16)
def _permutation(size: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """Permute the rows of a pass over a source; the first's is named by (seed, epoch) alone."""
    rng_path = (seed, epoch, source) if source else (seed, epoch)
    return np.random.default_rng(rng_path).permutation(size)


def proportional_counts(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to the weights, in whole numbers: largest remainders first.

    Example: [1, 1, 2] of 5 are 1.25, 1.25 and 2.5: [1, 1, 3].
    """
    exact = np.asarray(weights, np.float64) / np.sum(weights) * total
    found = np.floor(exact + 1e-9).astype(int)  # 0.1 / 0.3 * 3 is 1
    order = np.argsort(found - exact, kind="stable")  # of equal ones the first
    found[order[: total - found.sum()]] += 1
    return found.tolist()
