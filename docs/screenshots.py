"""Makes the pictures of docs/images/*.png in Chromium: a short run, its report, site, notebooks.

    python -m docs.screenshots             # from the root, after `make docs`; needs chromium and
                                           # nbconvert
    python -m docs.screenshots terminal    # the panel of a run alone
    python -m docs.screenshots notebooks   # the notebooks alone, which run to their end

Look at them before they are committed.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from rich.console import Console

from jaxrl import activity
from jaxrl.records.display.course import Course
from jaxrl.records.display.panel import Panel
from jaxrl.records.json_lines import read_lines
from jaxrl.report import report
from tests.examples.notebook_kernels import run_notebook
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
    "report_steps": f"#view=trajectories&step={STEPS}&against=5&groups=spread",
}
RELATIVE = """
for (const cell of document.querySelectorAll("td"))
  if (cell.textContent.endsWith("/runs/quickstart")) cell.textContent = "runs/quickstart";
"""  # the run lies in a temporary folder
NOTEBOOKS = {  # picture -> notebook, and the cell that it begins with
    "notebook_train": ("quickstart", "train"),
    "notebook_samples": ("tool_use", "last"),
}
LOADED = "document.readyState === 'complete' && document.querySelector('.md-content') !== null"


def train() -> Path:
    """The folder of a short run of the quickstart, below this one."""
    fields = [f"--config.{name}={value}" for name, value in RUN.items()]
    command = [sys.executable, "-m", "jaxrl.train", f"--config={ROOT}/configs/quickstart.py"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *fields], env=here, check=True, stdout=subprocess.DEVNULL)
    return Path("runs/quickstart")


def terminal(run: Path, step: int = STEPS * 2 // 3) -> Path:
    """Draw the panel of a run as it was at a step, from its metrics, on a page."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    course = Course(run.name)
    course.begin(0, STEPS)
    panel = Panel(course, console)
    for line in read_lines(run / "metrics.jsonl"):
        if line["step"] <= step:
            panel.stepped(int(line["step"]), line)
    with activity.doing("updating the policy"):
        console.print(panel.panel())
    page = run / "terminal.html"
    svg = console.export_svg(title="jaxrl")
    page.write_text(f"<body style='margin:0'>{svg}</body>", encoding="utf-8")
    return page.resolve()


def picture_of_terminal(run: Path) -> None:
    """Photograph the panel of a run."""
    with Browser(1240, 270) as browser:
        browser.open(terminal(run), drawn="document.querySelector('svg') !== null")
        browser.screenshot(IMAGES / "terminal.png")


def pictures_of_notebooks() -> None:
    """Run notebooks and photograph what they show."""
    with tempfile.TemporaryDirectory() as name, Browser(1000, 620) as browser:
        for picture, (notebook, cell) in NOTEBOOKS.items():
            given = nbformat.read(ROOT / f"examples/notebooks/{notebook}.ipynb", 4)
            html, _ = HTMLExporter().from_notebook_node(run_notebook(given, ROOT))
            page = Path(name) / f"{notebook}.html"
            page.write_text(html, encoding="utf-8")
            browser.open(page, drawn="document.readyState !== 'loading'")
            browser.run(f"document.getElementById('cell-id={cell}').scrollIntoView()")
            browser.screenshot(IMAGES / f"{picture}.png")


def main() -> None:
    if sys.argv[1:] == ["notebooks"]:
        pictures_of_notebooks()
        return
    if sys.argv[1:] == ["terminal"]:
        with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
            picture_of_terminal(train())
        return
    if not (SITE / "index.html").is_file():
        raise SystemExit(f"{SITE} is not built: run `make docs` first")
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        Browser(1400, 900) as browser,
    ):
        run = train()
        picture_of_terminal(run)
        page, _ = report(run)
        for picture, chosen in REPORT.items():
            browser.open(page.resolve(), chosen)
            browser.run(RELATIVE)
            browser.screenshot(IMAGES / f"{picture}.png")
        browser.open(SITE / "concepts.html", drawn=LOADED)
        browser.screenshot(IMAGES / "site.png")
    pictures_of_notebooks()


if __name__ == "__main__":
    main()
