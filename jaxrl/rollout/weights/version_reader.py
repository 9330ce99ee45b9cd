"""Weights for jaxrl's own servers through a folder or a bucket: the server's end."""

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxrl.models.transformer import Params
from jaxrl.rollout.weights.groups import Assembly, named, sums, whole_pieces
from jaxrl.rollout.weights.versions import FIX, Index, VersionDamaged, read_group, version_folder

_log = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """Hold a version in host memory."""

    version: int
    dtype: str
    arrays: dict[str, np.ndarray]


class VersionReader:
    """Read versions that `version_folder.VersionFolder` wrote.

    Where changes come, the newest version stays in host memory, and the next is read as what
    changed since. Who has it not reads the last whole version and all changes since.

    Args:
        abstract_params: shapes of the parameters.
        shardings: of them.
    """

    def __init__(self, abstract_params: Params, shardings: Params) -> None:
        self.abstract_params, self.shardings = abstract_params, named(shardings)
        self._kept: _Kept | None = None

    def read(self, folder: epath.Path) -> Params:
        """Return the parameters of a version, in the sampler's dtype.

        Raises:
            VersionDamaged: a file is missing, or not as it was written.
            ValueError: it is of another model.
        """
        kept, self._kept = self._kept, None  # what changes in it is of no version until the end
        if kept is not None:
            try:
                return self._read(folder, kept)
            except VersionDamaged as error:
                _log.warning("read from the last whole version on, because %s", error)
        return self._read(folder, None)

    def _read(self, folder: epath.Path, kept: _Kept | None) -> Params:
        newest = Index.read(folder)
        if kept is not None and kept.dtype != newest.dtype:
            kept = None
        wholes = whole_pieces(named(self.abstract_params), newest.dtype)
        assembly = Assembly(wholes, self.shardings)
        blank = {p.name: np.zeros(p.shape, jnp.dtype(p.dtype)) for p in wholes if kept is None}
        arrays = kept.arrays if kept else blank
        for place, index in _links(folder, newest, kept.version if kept else None):
            for file in index.files:
                assembly.check(file.pieces)
                pieces = read_group(place / file.name, file, arrays)
                for piece, array in zip(file.pieces, pieces, strict=True):
                    arrays[piece.name][piece.box] = array
        device = jax.local_devices()[0]
        for file in newest.files:
            # copies: on CPUs an array may be where its source is, which the next version changes
            copies = [np.array(arrays[piece.name][piece.box]) for piece in file.pieces]
            pieces = jax.device_put(copies, device)
            found = zip(file.pieces, sums(pieces), file.checksums, strict=True)
            if wrong := [piece.name for piece, ours, theirs in found if ours != theirs]:
                since = f"changes of version {newest.base}" if newest.base is not None else "whole"
                raise VersionDamaged(
                    f"{folder / file.name} ({since}) does not give version {newest.version}: other "
                    f"bits in {', '.join(wrong)}; {FIX}"
                )
            assembly.put(file.pieces, pieces)
        leaves = assembly.finish().values()
        if newest.keep:
            self._kept = _Kept(newest.version, newest.dtype, arrays)
        return jax.tree.unflatten(jax.tree.structure(self.abstract_params), leaves)


def _links(folder: epath.Path, newest: Index, held: int | None) -> list[tuple[epath.Path, Index]]:
    """Return what is to be read one after the other, to have a version where another is held."""
    links, wanted = [], newest.version
    while wanted != held:
        place = version_folder(folder.parent, wanted) if links else folder
        index = Index.read(place) if links else newest
        if index.version != wanted:
            raise VersionDamaged(f"{place} has version {index.version}, not {wanted}; {FIX}")
        links.append((place, index))
        if index.base is None:
            break
        wanted = index.base
    return links[::-1]
