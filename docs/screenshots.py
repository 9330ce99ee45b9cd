"""Makes the pictures of docs/images/*.png: a short run, its report, the built site, in Chromium.

    python -m docs.screenshots            # from the root, after `make docs`; needs chromium

Look at them before they are committed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from jaxrl.report import report
from tests.reporting.browser import Browser

ROOT = Path(__file__).parents[1]
SITE, IMAGES = ROOT / "build/site", ROOT / "docs/images"
STEPS = 60
RUN = {
    "trainer.run_name": "quickstart",
    "trainer.max_training_steps": STEPS,
    "trainer.policy.optimizer_config.scheduler": "constant",
    "trainer.eval_interval": 20,
    "trainer.hf_save_interval": -1,
    "trainer.dump_data_batch": True,  # the page then has advantages and ratios
}
# picture -> view of the report, what is clicked first
REPORT = {
    "report_overview": "overview",
    "report_curves": "curves",
    "report_time": "time",
    "report_trajectories": "trajectories",
}
LOADED = "document.readyState === 'complete' && document.querySelector('.md-content') !== null"


def train(folder: Path) -> Path:
    """The folder of a short run of the quickstart."""
    places = {
        "trainer.log_path": folder,
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.export_path": folder / "exports",
    }
    fields = [f"--config.{name}={value}" for name, value in {**RUN, **places}.items()]
    command = [sys.executable, "-m", "jaxrl.train", "--config=configs/quickstart.py", *fields]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder / "quickstart"


def main() -> None:
    if not (SITE / "index.html").is_file():
        raise SystemExit(f"{SITE} is not built: run `make docs` first")
    with tempfile.TemporaryDirectory() as name, Browser(1400, 900) as browser:
        page, _ = report(train(Path(name)), output=Path(name) / "report.html")
        for picture, view in REPORT.items():
            browser.open(page, f"#view={view}&step={STEPS}")
            browser.screenshot(IMAGES / f"{picture}.png")
        for picture, dark in (("site", False), ("site_dark", True)):
            browser.resize(1400, 900, dark=dark)
            browser.open(SITE / "concepts.html", drawn=LOADED)
            browser.screenshot(IMAGES / f"{picture}.png")


if __name__ == "__main__":
    main()
