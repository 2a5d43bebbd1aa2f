"""Which repositories count as cached from the Hub before an experiment starts."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import constants

from oelm.lab import preflight


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Return `available_from_hub` of a machine that is offline and whose cache is in `tmp_path`."""
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(preflight, "_cached_repositories", preflight._cached_repositories.__wrapped__)
    return preflight.available_from_hub.__wrapped__


def test_a_repository_with_a_snapshot_is_cached(tmp_path, cached):
    assert not cached("owner/name", "model"), "there is no cache folder at all"
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot / "config.json").write_text("{}")
    assert cached("owner/name", "model")
    assert not cached("owner/name", "dataset")


def test_a_download_that_has_no_snapshot_yet_is_not_cached(tmp_path, cached):
    (tmp_path / "hub" / "models--owner--name" / "blobs").mkdir(parents=True)
    assert not cached("owner/name", "model")


@pytest.mark.parametrize("answers", [True, False])
def test_what_is_not_cached_is_there_where_the_hub_answers(answers, cached, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(preflight, "hub_answers", lambda _: answers)
    assert cached("owner/name", "dataset") == answers
