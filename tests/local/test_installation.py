from __future__ import annotations

import sys
import types

import pytest


@pytest.fixture
def no_cml(monkeypatch):
    """What the test imports as cml is forgotten after it."""
    modules = dict(sys.modules)
    modules.pop("cml", None)
    modules.pop("cml.workers_v1", None)
    monkeypatch.setattr(sys, "modules", modules)


@pytest.fixture
def real_cml(no_cml, monkeypatch, tmp_path):
    (tmp_path / "cml").mkdir()
    (tmp_path / "cml" / "__init__.py").touch()
    (tmp_path / "cml" / "workers_v1.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def imported() -> types.ModuleType:
    namespace: dict = {}
    exec("from cml import workers_v1", namespace)
    return namespace["workers_v1"]


def test_installed_platform_is_imported_as_cml(platform, no_cml):
    platform.install()
    platform.install()
    assert imported() is platform


def test_real_cml_is_not_hidden_unless_forced(platform, real_cml):
    with pytest.raises(RuntimeError, match="force"):
        platform.install()
    assert imported() is not platform
    platform.install(force=True)
    assert imported() is platform
