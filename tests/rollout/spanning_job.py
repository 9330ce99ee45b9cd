"""What every process of a job does in test_followed.py: engines of two processes each sample.

    python -m tests.rollout.spanning_job FOLDER AHEAD [VICTIM]

writes the samples of every process into `FOLDER/of_<processes>`. One process has one engine. A
victim is a process that is killed while its engine samples.
"""

import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np

from jaxrl.models.hf import load_config
from jaxrl.models.transformer import abstract_params, init_params, logical_axes
from jaxrl.parallel import (
    ShardingRules,
    allgather,
    fetch,
    is_first,
    make_mesh,
    param_shardings,
    put,
)
from jaxrl.parallel.processes import joined_main
from jaxrl.rollout.native.engine import NativeEngine
from jaxrl.rollout.native.followed import phase_of, spanning_engine
from jaxrl.rollout.protocol import Request, Sampling
from jaxrl.rollout.weights.groups import to_engine


def main(argv):
    folder, ahead = Path(argv[0]), argv[1] == "1"
    victim = int(argv[2]) if argv[2:] else None
    model = load_config("configs/tiny_char_model")
    mesh = make_mesh(fsdp=-1)
    shardings = param_shardings(mesh, logical_axes(model), abstract_params(model), ShardingRules())
    alone = jax.device_get(init_params(model, 0))
    params = put(alone, shardings)
    first = jax.process_index() // 2 * 2
    mine = make_mesh(
        devices=[d for d in jax.devices() if first <= d.process_index < first + 2], tensor=4
    )
    kind = NativeEngine if jax.process_count() == 1 else spanning_engine
    # groups of 5,000 bytes cut every array
    options = {"max_num_seqs": 4, "max_model_len": 64, "steps_per_dispatch": 4, "group_bytes": 5000}
    engine = kind(model, mine, ahead=ahead, **options)
    engine.update_weights(params, 1)

    # straight to the engine's devices: spread over them, the same numbers, no more than it needs
    if jax.process_count() > 1:
        there = to_engine(params["layers"], mine, stacked=True)
        for name, x in there.items():
            assert x.sharding.device_set == set(mine.devices.flat), name
            whole = alone["layers"][name]
            assert all(s.data.size == whole.size // 4 for s in x.addressable_shards), name
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])

    asked = [
        Request(tuple(range(1, 4 + i)), tuple((i, j) for j in range(3)), Sampling(max_tokens=12))
        for i in range(3)
    ]
    engine.warm_up(asked)
    for version in (1, 2):
        samples = None
        with phase_of(engine) as leads:
            if leads:
                samples = [x for group in engine.generate(asked) for x in group]
        engine.sleep()
        fetch(params)  # a collective of training
        engine.update_weights(params, version + 1)
    found = allgather(samples and [[x] for x in samples])
    if victim is not None:
        if jax.process_index() == victim:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            with phase_of(engine) as leads:
                if leads:
                    engine.generate(asked)
    if is_first():
        (folder / f"of_{jax.process_count()}").write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
