"""A small stand-in of the Hugging Face Hub's HTTP API, for the real client to talk to."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
READ_ONLY = "hf_read_only"


class StandInHub:
    """Repositories in memory: commits are whole trees, large files go through LFS."""

    def __init__(self):
        self.repos = {}  # name -> {"private", "branches": {name: commit}, "commits": {oid: tree}}
        self.large = {}  # sha256 -> bytes
        self.requests = []  # (method, path)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path))
                self.body = self.read_body()
                status, headers, body = hub.answer(self, path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def read_body(self):
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def log_message(self, *args):
                pass

        for method in ("GET", "HEAD", "POST", "PUT"):
            setattr(Handler, f"do_{method}", Handler.answer)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def files(self, repo, revision="main"):
        """The files of a repository: path -> bytes."""
        return self.tree(repo, revision)[1]

    def put(self, repo, files, *, private=False):
        """Make a repository, or add a commit to it."""
        known = self.repos.setdefault(repo, {"private": private, "branches": {}, "commits": {}})
        head = known["commits"].get(known["branches"].get("main"), {})
        tree = head | files
        oid = hashlib.sha1(repr((len(known["commits"]), sorted(tree))).encode()).hexdigest()
        known["commits"][oid] = tree
        known["branches"]["main"] = oid
        return oid

    def tree(self, repo, revision):
        known = self.repos[repo]
        oid = known["branches"].get(revision, revision)
        return (oid, known["commits"][oid]) if oid in known["commits"] else None

    def answer(self, request, path):
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if request.command == "POST" and token not in (TOKEN, READ_ONLY):
            return refused(401, "", "Invalid username or password.")
        if request.command == "POST" and token == READ_ONLY:
            return refused(403, "", "You don't have the rights to do this")
        for pattern, reply in ROUTES:
            match = re.fullmatch(pattern, path)
            if match:
                return reply(self, request, token, *match.groups())
        return refused(404, "", f"no route {path}")

    def create(self, request, token):
        asked = json.loads(request.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.repos:
            return as_json({"error": "exists", "url": f"{self.url}/{repo}"}, 409)
        self.put(repo, {".gitattributes": b""}, private=asked.get("visibility") == "private")
        return as_json({"url": f"{self.url}/{repo}"})

    def info(self, request, token, repo, revision=None):
        found = self.visible(repo, revision or "main", token)
        if len(found) == 3:
            return found
        oid, tree = found
        return as_json({"id": repo, "sha": oid, "siblings": [{"rfilename": f} for f in tree]})

    def preupload(self, request, token, repo, revision):
        files = json.loads(request.body)["files"]
        modes = {True: "lfs", False: "regular"}
        answers = [
            {
                "path": file["path"],
                "uploadMode": modes[file["path"].endswith(".safetensors")],
                "shouldIgnore": False,
            }
            for file in files
        ]
        return as_json({"files": answers})

    def lfs_batch(self, request, token, repo):
        objects = json.loads(request.body)["objects"]
        answers = [
            {
                "oid": asked["oid"],
                "size": asked["size"],
                "actions": {"upload": {"href": f"{self.url}/lfs/{asked['oid']}"}},
            }
            for asked in objects
        ]
        return as_json({"transfer": "basic", "objects": answers})

    def lfs_upload(self, request, token, oid):
        if hashlib.sha256(request.body).hexdigest() != oid:
            return refused(400, "", "the bytes are others")
        self.large[oid] = request.body
        return 200, {}, b""

    def commit(self, request, token, repo, revision):
        files = {}
        for line in request.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if entry["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
        oid = self.put(repo, files)
        return as_json({"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid})

    def resolve(self, request, token, repo, revision, file):
        found = self.visible(repo, revision, token)
        if len(found) == 3:
            return found
        oid, tree = found
        if file not in tree:
            return refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha256(tree[file]).hexdigest()}"'}
        return 200, headers, tree[file]

    def visible(self, repo, revision, token):
        """(commit, tree), or the refusal that the Hub gives."""
        if repo not in self.repos or (self.repos[repo]["private"] and token != TOKEN):
            return refused(401, "RepoNotFound", "Repository not found")
        found = self.tree(repo, revision)
        return found or refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def accept(self, request, token):
        return as_json({"errors": [], "warnings": []})


def as_json(value, status=200):
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def refused(status, code, message):
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return status, headers, json.dumps({"error": message}).encode()


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("/api/repos/create", StandInHub.create),
    ("/api/validate-yaml", StandInHub.accept),
    (f"/api/models/{REPO}", StandInHub.info),
    (f"/api/models/{REPO}/revision/(.+)", StandInHub.info),
    (f"/api/models/{REPO}/preupload/(.+)", StandInHub.preupload),
    (f"/api/models/{REPO}/commit/(.+)", StandInHub.commit),
    (f"/{REPO}\\.git/info/lfs/objects/batch", StandInHub.lfs_batch),
    (r"/lfs/(\w+)", StandInHub.lfs_upload),
    (f"/{REPO}/resolve/([^/]+)/(.+)", StandInHub.resolve),
]
