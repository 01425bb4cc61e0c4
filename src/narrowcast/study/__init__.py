"""Can low-precision communication improve training with no loss of accuracy? A file asks, `run` answers.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import lazy_front

if TYPE_CHECKING:
    from narrowcast.study.analysis import formatting as formatting
    from narrowcast.study.analysis.finding import Finding as Finding
    from narrowcast.study.analysis.finding import grouped as grouped
    from narrowcast.study.analysis.findings import Accuracy as Accuracy
    from narrowcast.study.analysis.findings import Findings as Findings
    from narrowcast.study.analysis.findings import Step as Step
    from narrowcast.study.analysis.findings import Uncompared as Uncompared
    from narrowcast.study.analysis.statistics import Conclusion as Conclusion
    from narrowcast.study.analysis.statistics import Interval as Interval
    from narrowcast.study.analysis.verdict import judge as judge
    from narrowcast.study.analysis.verdict import verdict_lines as verdict_lines
    from narrowcast.study.analysis.verdict import verdict_text as verdict_text
    from narrowcast.study.cases import PLAIN as PLAIN
    from narrowcast.study.cases import Case as Case
    from narrowcast.study.cases import expand as expand
    from narrowcast.study.datasets import Examples as Examples
    from narrowcast.study.execution import results as results
    from narrowcast.study.execution import runner as runner
    from narrowcast.study.execution import sbatch as sbatch
    from narrowcast.study.execution import torchrun as torchrun
    from narrowcast.study.execution.launch import LAUNCHERS as LAUNCHERS
    from narrowcast.study.execution.results import Results as Results
    from narrowcast.study.execution.results import ResultsError as ResultsError
    from narrowcast.study.execution.results import latest as latest
    from narrowcast.study.execution.results import usable_lines as usable_lines
    from narrowcast.study.execution.runner import Options as Options
    from narrowcast.study.execution.runner import Outcome as Outcome
    from narrowcast.study.execution.runner import every_case as every_case
    from narrowcast.study.execution.runner import run as run
    from narrowcast.study.execution.trainers import LR as LR
    from narrowcast.study.execution.trainers import Counted as Counted
    from narrowcast.study.execution.trainers import counted_of as counted_of
    from narrowcast.study.execution.trainers import plain_bytes as plain_bytes
    from narrowcast.study.file import KINDS as KINDS
    from narrowcast.study.file import Grid as Grid
    from narrowcast.study.file import StudyFile as StudyFile
    from narrowcast.study.file import builtins as builtins
    from narrowcast.study.file import load as load
    from narrowcast.study.file import parse as parse
    from narrowcast.study.models import linear_layers as linear_layers
    from narrowcast.study.models import seeded as seeded
    from narrowcast.study.report import default_path as default_path
    from narrowcast.study.report import write as write
    from narrowcast.study.report import write_report as write_report
    from narrowcast.study.report.export import as_csv as as_csv
    from narrowcast.study.report.export import summary as summary
    from narrowcast.study.report.markdown import as_markdown as as_markdown
    from narrowcast.study.report.page import page as page
    from narrowcast.study.report.sections import Insight as Insight
    from narrowcast.study.report.sections import Statements as Statements
    from narrowcast.study.report.sections import Support as Support
    from narrowcast.study.spec_bits import Share as Share
    from narrowcast.study.spec_bits import code_bits as code_bits
    from narrowcast.study.spec_bits import message_share as message_share
    from narrowcast.study.spec_bits import wire_bits as wire_bits

    read_results = results.read
    sbatch_script = sbatch.script

HOMES = {
    "formatting": "analysis.formatting:",
    "results": "execution.results:",
    "runner": "execution.runner:",
    "sbatch": "execution.sbatch:",
    "torchrun": "execution.torchrun:",
    "PLAIN": "cases",
    "Examples": "datasets",
    "Counted": "execution.trainers",
    "LR": "execution.trainers",
    "counted_of": "execution.trainers",
    "plain_bytes": "execution.trainers",
    "linear_layers": "models",
    "seeded": "models",
    "Insight": "report.sections",
    "Statements": "report.sections",
    "Support": "report.sections",
    "Share": "spec_bits",
    "message_share": "spec_bits",
    "KINDS": "file",
    "Grid": "file",
    "StudyFile": "file",
    "builtins": "file",
    "load": "file",
    "parse": "file",
    "Case": "cases",
    "expand": "cases",
    "code_bits": "spec_bits",
    "wire_bits": "spec_bits",
    "LAUNCHERS": "execution.launch",
    "Results": "execution.results",
    "ResultsError": "execution.results",
    "latest": "execution.results",
    "read_results": "execution.results:read",
    "usable_lines": "execution.results",
    "Options": "execution.runner",
    "Outcome": "execution.runner",
    "every_case": "execution.runner",
    "run": "execution.runner",
    "sbatch_script": "execution.sbatch:script",
    "Finding": "analysis.finding",
    "grouped": "analysis.finding",
    "Accuracy": "analysis.findings",
    "Findings": "analysis.findings",
    "Step": "analysis.findings",
    "Uncompared": "analysis.findings",
    "Conclusion": "analysis.statistics",
    "Interval": "analysis.statistics",
    "judge": "analysis.verdict",
    "verdict_lines": "analysis.verdict",
    "verdict_text": "analysis.verdict",
    "default_path": "report",
    "write": "report",
    "write_report": "report",
    "as_csv": "report.export",
    "summary": "report.export",
    "as_markdown": "report.markdown",
    "page": "report.page",
}
"""Every public name and the module that holds it."""

__getattr__, __dir__, __all__ = lazy_front(__name__, HOMES)
