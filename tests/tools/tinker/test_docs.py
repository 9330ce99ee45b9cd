"""The loop of docs/tinker.md runs as it stands."""

import re
import warnings
from pathlib import Path

from tests.tools.tinker.serving import serving

PAGE = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text()


def test_the_first_loop(tmp_path, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    name = {"generator__inference_engine__served_model_name": "sorts"}
    with serving(tmp_path, **name) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK's own deprecations
        names = {"url": server.url}
        exec(block, names)
        names["service"].close("success").result()
    *steps, answer = capsys.readouterr().out.strip().splitlines()
    losses = [float(line.split()[1]) for line in steps[-10:]]
    assert losses[-1] < losses[0]
    assert len(answer) <= 4
