"""Makes the pictures of docs/images/*.png: a short run, its report, the built site, in Chromium.

    python -m docs.screenshots            # from the root, after `make docs`; needs chromium

Look at them before they are committed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxrl.report import report
from tests.tools.report.browser import Browser

ROOT = Path(__file__).resolve().parents[1]
SITE, IMAGES = ROOT / "build/site", ROOT / "docs/images"
STEPS = 60
RUN = {
    "trainer.max_training_steps": STEPS,
    "trainer.policy.optimizer_config.scheduler": "constant",
    "trainer.eval_interval": 20,
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": True,  # the page then has advantages and ratios
}
REPORT = {  # picture -> what is chosen in the page
    "report_overview": f"#view=overview&step={STEPS}",
    "report_curves": f"#view=curves&step={STEPS}",
    "report_trajectories": "#view=trajectories&step=30",
}
RELATIVE = """
for (const cell of document.querySelectorAll("td"))
  if (cell.textContent.endsWith("/runs/quickstart")) cell.textContent = "runs/quickstart";
"""  # the run lies in a temporary folder
LOADED = "document.readyState === 'complete' && document.querySelector('.md-content') !== null"


def train() -> Path:
    """The folder of a short run of the quickstart, below this one."""
    fields = [f"--config.{name}={value}" for name, value in RUN.items()]
    command = [sys.executable, "-m", "jaxrl.train", f"--config={ROOT}/configs/quickstart.py"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *fields], env=here, check=True, stdout=subprocess.DEVNULL)
    return Path("runs/quickstart")


def main() -> None:
    if not (SITE / "index.html").is_file():
        raise SystemExit(f"{SITE} is not built: run `make docs` first")
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        Browser(1400, 900) as browser,
    ):
        page, _ = report(train())
        for picture, chosen in REPORT.items():
            browser.open(page.resolve(), chosen)
            browser.run(RELATIVE)
            browser.screenshot(IMAGES / f"{picture}.png")
        browser.open(SITE / "concepts.html", drawn=LOADED)
        browser.screenshot(IMAGES / "site.png")


if __name__ == "__main__":
    main()
