# SPDX-License-Identifier: MIT
"""Order of the tests."""

def pytest_collection_modifyitems(items):
    """README's scripts run beside the other tests, and are waited for at the end."""
    items.sort(key=lambda item: item.name == "test_scripts_run")
