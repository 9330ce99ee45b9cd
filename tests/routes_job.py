"""`jaxrl.train` with a look at what the processes of a job tell one another of experts.

Each writes `told_<i>.json` into the folder of the run: the bytes of each batch that it told, and
how many arrays of experts went to devices. What arrives there is compared with what all have.
"""

import json
import pickle
import sys
from pathlib import Path

import jax
import numpy as np

from jaxrl import train
from jaxrl.data.columns import ROUTES
from jaxrl.parallel import fetch, processes
from jaxrl.parallel.processes import allgather, joined_main, put_share
from jaxrl.rollout.conversations import across_processes

told = {"bytes": [], "arrays": 0}


def telling(value):
    told["bytes"].append(len(pickle.dumps(value)))
    found = allgather(value)
    assert not any(ROUTES in output for output, *_ in found if output is not None)
    return found


def putting(share, sharding):
    array = put_share(share, sharding)
    told["arrays"] += 1
    shares = np.stack(allgather(share.known))
    assert (shares > 0).sum(0).max() <= 1
    assert array.sharding == sharding
    np.testing.assert_array_equal(fetch(array), shares.sum(0, dtype=shares.dtype))
    return array


def main(argv):
    across_processes.allgather, processes.put_share = telling, putting
    status = train.main(argv)
    folder = next(word for word in argv if "trainer.log_path=" in word).partition("=")[2]
    path = Path(folder.partition("=")[2] or folder) / f"told_{jax.process_index()}.json"
    path.write_text(json.dumps(told))
    return status


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
