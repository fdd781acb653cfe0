"""python examples/serve_library.py LIBRARY [--port 8000]: POST an image to /DOMAIN.

One base, a merged network for every domain of the library, and the standard library's HTTP server,
on this machine only.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polymask as pm
from polymask.pack import packs_in
from polymask.predict import Classifier

LARGEST = 20_000_000  # bytes of an image


class Answer(BaseHTTPRequestHandler):
    """Tells what the domain in the path sees in the image that was posted."""

    domains: dict[str, tuple[Classifier, list[str]]]

    def do_POST(self) -> None:
        """Answer one request."""
        status, content = self.answer(self.path.strip("/"))
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, name: str) -> tuple[int, dict]:
        """A status and the five likeliest classes."""
        size = self.headers.get("Content-Length", "")
        if name not in self.domains:
            return 404, {"error": f"no domain {name!r}", "domains": list(self.domains)}
        if not size.isdecimal() or not 0 < int(size) <= LARGEST:
            return 413, {"error": f"post an image of at most {LARGEST} bytes"}
        classify, classes = self.domains[name]
        try:
            (probabilities,) = classify([self.rfile.read(int(size))])
        except pm.DataError as error:
            return 400, {"error": str(error)}
        top = probabilities.topk(min(5, len(classes)))
        found = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return 200, {"top": [{"class": classes[i], "probability": p} for i, p in found]}


def main() -> None:
    """Load a library and answer until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    packs = packs_in(options.library)
    base = pm.load_base(pm.inspect(packs[0]).manifest.base)
    domains = {pack.stem: pm.load_domain(pack, base) for pack in packs}
    Answer.domains = {n: (Classifier(base, d), list(d.classes or [])) for n, d in domains.items()}
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Answer)
    print(f"{', '.join(domains)} at http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
