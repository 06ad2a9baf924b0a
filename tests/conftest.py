"""What holds for all tests."""

import os
from typing import NoReturn

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Code under test that ends the process ends its test; pytest would be gone without a word."""
    here, leave = os.getpid(), os._exit

    def leave_or_fail(code: int) -> NoReturn:
        if os.getpid() == here:
            pytest.fail(f"the code under test ended pytest's own process (os._exit({code}))")
        leave(code)

    os._exit = leave_or_fail  # type: ignore[assignment]
