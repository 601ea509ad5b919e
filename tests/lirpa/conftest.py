"""auto_LiRPA is optional: where it can't be imported, these tests are skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from parverify.errors import UsageError
from parverify.lirpa.compat import Lirpa, lirpa


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """auto_LiRPA warns of what newer versions of torch and numpy deprecate, and of norms; that is its business."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def library() -> Lirpa:
    """auto_LiRPA: what is installed, or the checkout that AUTO_LIRPA names."""
    try:
        return lirpa()
    except UsageError as error:
        pytest.skip(str(error))
