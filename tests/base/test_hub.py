"""Whether the Hub answers is found out once, in seconds, and without it only the cache is read."""

import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from oelm.base import hub
from tests.support.hub import local_hub


@pytest.fixture(autouse=True)
def not_asked_yet() -> Iterator[None]:
    hub.hub_answers.cache_clear()
    yield
    hub.hub_answers.cache_clear()


def test_a_server_that_answers_is_the_hub():
    with local_hub() as server:
        assert hub.hub_answers(server.url)


def test_a_closed_port_and_a_silent_server_do_not_answer(monkeypatch):
    monkeypatch.setattr(hub, "_PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not hub.hub_answers(f"http://127.0.0.1:{port}")
    hub.hub_answers.cache_clear()
    assert not hub.hub_answers(f"http://127.0.0.1:{port}"), "nobody listens there any more"


def test_the_hub_is_asked_only_for_what_is_no_folder(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(hub, "hub_answers", lambda endpoint: asked.append(endpoint))
    assert hub.hub_options(tmp_path) == {}
    assert not asked
    assert hub.hub_options("owner/name") == {"local_files_only": True}
    assert len(asked) == 1


def test_with_the_hub_switched_off_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "hub_answers", lambda _: pytest.fail("asked"))
    assert hub.hub_options("owner/name") == {}
    with hub.cache_without_hub():
        assert constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE, "it stays switched off"


@pytest.mark.parametrize("answers", [True, False])
def test_without_the_hub_libraries_read_only_their_cache(answers, monkeypatch):
    datasets_config = SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "datasets.config", datasets_config)
    monkeypatch.setattr(hub, "hub_answers", lambda _: answers)
    libraries = [constants, datasets_config]
    with hub.cache_without_hub():
        assert [library.HF_HUB_OFFLINE for library in libraries] == [not answers] * 2
    assert not any(library.HF_HUB_OFFLINE for library in libraries)
