"""Command line -> configuration, checked as a whole before anything starts. No torch here."""

from megatron.training.arguments.check import (
    check_command_line,
    find_problems,
    refusal,
    validate,
)
from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.resolve import (
    ResolvedRun,
    finalize,
    resolve_schedule,
)
from megatron.training.arguments.resume import (
    ResumeReport,
    RunRecord,
    allowed_names,
    check_resume,
)

__all__ = [
    "ResolvedRun",
    "ResumeReport",
    "RunRecord",
    "allowed_names",
    "build_parser",
    "check_command_line",
    "check_resume",
    "finalize",
    "find_problems",
    "parse_args",
    "refusal",
    "resolve_schedule",
    "validate",
]
