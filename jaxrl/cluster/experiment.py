"""Run a process of a job: the launcher hands it the pickled experiment by standard input.

python -m jaxrl.cluster.experiment < job
"""

import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle

from jaxrl.config import TrainConfig
from jaxrl.config.dataclass_config import config_classes
from jaxrl.functions import is_of_program
from jaxrl.parallel.processes import joined_main
from jaxrl.registry import load_snapshot, register_configured_functions, snapshot
from jaxrl.registry.pickling import PackedFunction, pack, unpack, user_modules
from jaxrl.train import BasePPOExp, exit_status


class Job(NamedTuple):
    """Hold what every process of a job is given.

    Attributes:
        config: pickled.
        experiment: class, as user functions are packed.
        registry: of user losses and estimators, see `jaxrl.registry.snapshot`.
    """

    config: bytes
    experiment: PackedFunction
    registry: bytes


def pack_job(config: TrainConfig, experiment: type[BasePPOExp]) -> Job:
    """Pack config, experiment and user functions by value: hosts need not have their modules.

    Raises:
        ValueError: a class or function of the user cannot be pickled, or only this process finds
            it; names it.
    """
    _check_paths(config)
    for config_class in config_classes(config):
        for module in user_modules(config_class):
            cloudpickle.register_pickle_by_value(module)
    register_configured_functions(config.trainer.algorithm)
    try:
        data = cloudpickle.dumps(config)
    except Exception as error:
        raise ValueError(
            f"the config cannot be pickled for the other processes ({error}): its module must not "
            "hold what cannot be, such as a lock or an open file; create that inside a function"
        ) from error
    return Job(data, pack(experiment, f"experiment {experiment.__name__}", {}), snapshot())


def _check_paths(config: TrainConfig) -> None:
    """Refuse functions and classes that the other processes would look for in vain.

    Losses and estimators go by value; of these the other processes import the module.
    """
    environment, data = config.environment, config.data
    paths = {
        "environment.env_class": [environment.env_class],
        "environment.reward_functions": environment.reward_functions,
        "trainer.watching.callbacks": config.trainer.watching.callbacks,
        "data.train_data": data.train_data,
        "data.val_data": data.val_data,
    }
    for field, named in paths.items():
        for path in named:
            if ":" in path and is_of_program(path.partition(":")[0]):
                raise ValueError(
                    f"{field}: {path} is defined in a script, a notebook or a recipe, which the "
                    "processes on other hosts do not have: put it into a module of its own, and "
                    "import it from there"
                )


def main(argv: Sequence[str]) -> int:
    """Run the job, without arguments, and return its exit status."""
    job = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nothing more will come
    load_snapshot(job.registry)
    experiment: Any = unpack(job.experiment, "experiment")[0]
    return exit_status(experiment, pickle.loads(job.config))


if __name__ == "__main__":
    sys.exit(joined_main(main, sys.argv[1:]))
