"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="three optimizer steps for every network under every plan in the parity suite (about 15 minutes more)",
    )
