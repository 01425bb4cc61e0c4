"""Can low-precision communication improve training with no loss of accuracy? A file asks, `run` answers.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import lazy_front

if TYPE_CHECKING:
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
    from narrowcast.study.cases import Case as Case
    from narrowcast.study.cases import expand as expand
    from narrowcast.study.execution import results, sbatch
    from narrowcast.study.execution.launch import LAUNCHERS as LAUNCHERS
    from narrowcast.study.execution.results import Results as Results
    from narrowcast.study.execution.results import ResultsError as ResultsError
    from narrowcast.study.execution.results import latest as latest
    from narrowcast.study.execution.results import usable_lines as usable_lines
    from narrowcast.study.execution.runner import Options as Options
    from narrowcast.study.execution.runner import Outcome as Outcome
    from narrowcast.study.execution.runner import every_case as every_case
    from narrowcast.study.execution.runner import run as run
    from narrowcast.study.file import KINDS as KINDS
    from narrowcast.study.file import Grid as Grid
    from narrowcast.study.file import StudyFile as StudyFile
    from narrowcast.study.file import builtins as builtins
    from narrowcast.study.file import load as load
    from narrowcast.study.file import parse as parse
    from narrowcast.study.report import default_path as default_path
    from narrowcast.study.report import write as write
    from narrowcast.study.report import write_report as write_report
    from narrowcast.study.report.export import as_csv as as_csv
    from narrowcast.study.report.export import summary as summary
    from narrowcast.study.report.markdown import as_markdown as as_markdown
    from narrowcast.study.report.page import page as page
    from narrowcast.study.spec_bits import code_bits as code_bits
    from narrowcast.study.spec_bits import wire_bits as wire_bits

    read_results = results.read
    sbatch_script = sbatch.script

HOMES = {
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
