"""Can low-precision communication improve training with no loss of accuracy? A file asks, `run` answers.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import lazy_front

if TYPE_CHECKING:
    from narrowcast.study.analysis import formatting as formatting
    from narrowcast.study.analysis.comparison import Comparison as Comparison
    from narrowcast.study.analysis.finding import Finding as Finding
    from narrowcast.study.analysis.finding import grouped as grouped
    from narrowcast.study.analysis.findings import Accuracy as Accuracy
    from narrowcast.study.analysis.findings import Findings as Findings
    from narrowcast.study.analysis.findings import Step as Step
    from narrowcast.study.analysis.findings import Uncompared as Uncompared
    from narrowcast.study.analysis.statistics import Conclusion as Conclusion
    from narrowcast.study.analysis.statistics import Equivalence as Equivalence
    from narrowcast.study.analysis.statistics import Interval as Interval
    from narrowcast.study.analysis.statistics import equivalence as equivalence
    from narrowcast.study.analysis.statistics import holm as holm
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
    from narrowcast.study.file import text_of as text_of
    from narrowcast.study.models import linear_layers as linear_layers
    from narrowcast.study.models import seeded as seeded
    from narrowcast.study.report import default_path as default_path
    from narrowcast.study.report import write as write
    from narrowcast.study.report import write_report as write_report
    from narrowcast.study.report.compare import compare_page as compare_page
    from narrowcast.study.report.compare import comparison_facts as comparison_facts
    from narrowcast.study.report.export import as_csv as as_csv
    from narrowcast.study.report.export import as_markdown as as_markdown
    from narrowcast.study.report.export import summary as summary
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

MODULES = {
    "analysis.comparison": "Comparison",
    "analysis.finding": "Finding grouped",
    "analysis.findings": "Accuracy Findings Step Uncompared",
    "analysis.statistics": "Conclusion Equivalence Interval equivalence holm",
    "analysis.verdict": "judge verdict_lines verdict_text",
    "cases": "PLAIN Case expand",
    "datasets": "Examples",
    "execution.launch": "LAUNCHERS",
    "execution.results": "Results ResultsError latest usable_lines",
    "execution.runner": "Options Outcome every_case run",
    "execution.trainers": "LR Counted counted_of plain_bytes",
    "file": "KINDS Grid StudyFile builtins load parse text_of",
    "models": "linear_layers seeded",
    "report": "default_path write write_report",
    "report.compare": "compare_page comparison_facts",
    "report.export": "as_csv as_markdown summary",
    "report.page": "page",
    "report.sections": "Insight Statements Support",
    "spec_bits": "Share code_bits message_share wire_bits",
}
"""Modules, and the public names that they hold."""
HOMES = {
    **{name: module for module, names in MODULES.items() for name in names.split()},
    "formatting": "analysis.formatting:",
    "results": "execution.results:",
    "runner": "execution.runner:",
    "sbatch": "execution.sbatch:",
    "torchrun": "execution.torchrun:",
    "read_results": "execution.results:read",
    "sbatch_script": "execution.sbatch:script",
}

__getattr__, __dir__, __all__ = lazy_front(__name__, HOMES)
