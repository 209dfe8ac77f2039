"""Small modern networks of the hub, from a stand-in of it on this machine."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
from safetensors.torch import save

from everytoken_lab.annotators.features import Candidate, FrozenBackbone, candidates
from everytoken_lab.models import open as opening

NAME = "test_vit.r160_in1k"


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A hub with one file; `asked`: the requests. `stalled` is set when the rest of the file may be sent."""
    content = save(timm.create_model("test_vit").state_dict())

    class Handler(BaseHTTPRequestHandler):
        def answer(self, with_content):
            server.asked.append(f"{self.command} {self.path}")
            self.send_response(200)
            headers = {"ETag": '"1"', "X-Repo-Commit": "c" * 40, "Content-Length": str(len(content))}
            for header in headers.items():
                self.send_header(*header)
            self.end_headers()
            if with_content:
                self.wfile.write(content[:100])
                server.stalled.wait(20)
                self.wfile.write(content[100:])

        def do_HEAD(self):
            self.answer(False)

        def do_GET(self):
            self.answer(True)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.stalled = [], threading.Event()
    server.stalled.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    place = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
    template = f"{place}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.stalled.set()
    server.shutdown()
    server.server_close()


def fetch(seconds=60.0, images=1, size=64):
    told = []
    opening.fetch_modern(seconds, images, told.append, {NAME: size})
    return told


def test_a_network_is_downloaded_once_and_is_a_candidate_at_its_size(stand_in, monkeypatch):
    (line,) = fetch()
    for part in (f"timm:{NAME}", " MB", "licence apache-2.0", "--offline"):
        assert part in line
    assert fetch() == []
    assert sum(request.startswith("GET /timm/") for request in stand_in.asked) == 1
    monkeypatch.setitem(opening.MODERN, NAME, 64)
    assert Candidate(f"timm:{NAME}", 64) in candidates()
    assert FrozenBackbone(f"timm:{NAME}", 64).dim == 64


def test_a_stalled_download_ends_in_one_sentence(stand_in):
    stand_in.stalled.clear()
    started = time.monotonic()
    _, line = fetch(seconds=0.5)
    assert time.monotonic() - started < 5
    assert "was not downloaded and is not tried: it took more than" in line


def test_a_network_that_is_too_slow_for_the_photos_is_not_downloaded(stand_in):
    (line,) = fetch(images=10_000_000)
    assert line.startswith(f"Not downloaded: timm:{NAME}")
    assert not any(request.startswith("GET /timm/") for request in stand_in.asked)


def test_offline_the_hub_is_not_asked(stand_in, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch() == []
    assert stand_in.asked == []


def test_without_a_hub_one_sentence_says_that_only_weights_at_hand_are_tried(stand_in):
    stand_in.server_close()
    stand_in.shutdown()
    (line,) = fetch()
    assert "Only weights on this machine are tried" in line


def test_the_licences_of_the_networks_allow_every_use():
    for name in opening.MODERN:
        assert timm.get_pretrained_cfg(name).license in ("apache-2.0", "mit", "bsd-3-clause")
        assert timm.is_model_pretrained(name)
