"""A server that is told to end does end, whatever is under way."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving import library

DRAIN = 2
STUCK = """
import sys, time
from pathlib import Path
from polymask.serve import process, app
from polymask.serve.settings import Settings
from serving import BASE
app.open_base = lambda settings: BASE
def stuck(self, *arguments):
    time.sleep(600)
app.Engine._run = stuck
settings = Settings(library=Path(sys.argv[1]))
drain, ready = int(sys.argv[2]), lambda url, *more: print(url, flush=True)
process.serve(settings, host="127.0.0.1", port=0, workers=1, drain=drain, ready=ready)
"""


@pytest.mark.slow
def test_the_process_is_gone_soon_after_its_drain_with_requests_that_never_end(tmp_path):
    import http.client
    import json
    import threading

    from serving import JSON, picture, text

    folder = library(tmp_path / "library", 1)
    search = os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", STUCK, str(folder), str(DRAIN)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": search})
    try:
        port = int(re.search(r":(\d+)\s*$", process.stdout.readline())[1])
        body = json.dumps({"domain": "d0", "images": [text(picture())]})

        def ask():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("POST", "/v1/predict", body, JSON)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass  # it is the server's end that is looked at
            finally:
                connection.close()

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        process.wait(DRAIN + 30)
        assert time.monotonic() - began < DRAIN + 5
        for asker in askers:
            asker.join(60)
    finally:
        process.kill()
        process.communicate()
