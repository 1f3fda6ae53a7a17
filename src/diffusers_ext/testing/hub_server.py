# SPDX-License-Identifier: Apache-2.0
"""A Hub on loopback: the routes that huggingface_hub really uses, with faults to order.

Standard library only, and everything is in memory: what was published is gone when the server stops.
"""

import base64
import contextlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

from .hub_repository import Blob, HubError, Repository


_PREFIXES = {"models": "model", "datasets": "dataset", "spaces": "space"}
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)


@dataclass
class Fault:
    """
    What goes wrong with the next requests that match.

    Args:
        pattern (`str`): regular expression that is searched in the path.
        method (`str`, *optional*): only requests of this method.
        times (`int`, *optional*, defaults to 1): how often it happens.
        status (`int`, *optional*): answer this status at once, for instance 429 or 503.
        headers (`dict`, *optional*): headers of that answer, for instance `{"Retry-After": "1"}`.
        cut (`float`, *optional*): send this share of the body and close the connection. A request that carries a
            body is not carried out; 1.0 carries it out and loses the answer.
        corrupt (`bool`, *optional*, defaults to `False`): flip the last byte of the body, so that the hash is wrong.
        delay (`float`, *optional*, defaults to 0): seconds to wait before the answer.
    """

    pattern: str
    method: str | None = None
    times: int = 1
    status: int | None = None
    headers: dict = field(default_factory=dict)
    cut: float | None = None
    corrupt: bool = False
    delay: float = 0.0


class HubServer:
    """
    A Hub bound to 127.0.0.1, used as a context manager.

    Args:
        port (`int`, *optional*, defaults to 0): port, or 0 for any free one.
        users (`dict`, *optional*): token to names of the user and of the organisations it may write to, the user
            first; defaults to one user `me` with the organisation `org`, whose token is `DEFAULT_TOKEN`.

    `environment` holds the variables that a client process needs, `requests` lists what was asked as
    `(method, path, status)`, and `repository(id)` gives the [`Repository`] behind an id.

    Example:

    ```py
    >>> from huggingface_hub import HfApi
    >>> from diffusers_ext.testing import HubServer

    >>> with HubServer() as hub:
    ...     HfApi(endpoint=hub.endpoint, token=hub.token).whoami()["name"]
    'me'
    ```
    """

    DEFAULT_TOKEN = "hf_loopback"

    def __init__(self, port=0, users=None):
        self.users = users or {self.DEFAULT_TOKEN: ("me", "org")}
        self.repositories, self.requests, self.faults = {}, [], []
        self.lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"hub": self}))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def token(self):
        return next(iter(self.users))

    @property
    def environment(self):
        # Uploads go through Xet by default, which is another protocol.
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def start(self):
        self._thread.start()
        return self

    def stop(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def repository(self, repo_id, repo_type="model"):
        return self.repositories[repo_type, repo_id]

    def inject(self, pattern, **fault):
        """Orders a [`Fault`]; returns it."""
        self.faults.append(Fault(pattern, **fault))
        return self.faults[-1]

    def _next_fault(self, method, path):
        for fault in self.faults:
            if fault.times > 0 and fault.method in (None, method) and re.search(fault.pattern, path):
                fault.times -= 1
                return fault
        return None


class _Dropped(Exception):
    """The connection is to be closed without an answer."""


_ROUTES = []


def _route(method, pattern):
    def register(function):
        _ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


_REPO = r"/api/(?P<kind>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)"
_FILE = r"/(?:(?P<kind>datasets|spaces)/)?(?P<repo_id>[^/]+/[^/]+)/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._fault, self._answered = None, 0
        split = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        self.body = self._read_body()
        with self.hub.lock:
            fault = self._fault = self.hub._next_fault(self.command, split.path)
        try:
            if fault is not None:
                time.sleep(fault.delay)
                if fault.status is not None:
                    raise HubError(fault.status, "Ordered by a test.")
                if fault.cut is not None and self.command not in ("GET", "HEAD") and fault.cut < 1:
                    raise _Dropped
            with self.hub.lock:
                answer = self._dispatch(split.path)
            if fault is not None and fault.cut is not None and self.command not in ("GET", "HEAD"):
                raise _Dropped
            self._send(*answer)
        except HubError as error:
            headers = {"X-Error-Message": error.message, **(fault.headers if fault is not None else {})}
            if error.code:
                headers["X-Error-Code"] = error.code
            self._send(error.status, json.dumps({"error": error.message}).encode(), headers)
        except _Dropped:
            self.close_connection = True
        self.hub.requests.append((self.command, split.path, self._answered))

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _read_body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _dispatch(self, path):
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, function in _ROUTES:
            match = pattern.fullmatch(path)
            if wanted == method and match:
                groups = {name: unquote(value or "") for name, value in match.groupdict().items()}
                answer = function(self, **groups)
                if isinstance(answer, tuple):
                    return answer
                return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        raise HubError(404, f"No route {self.command} {path}")

    def _send(self, status, content, headers):
        self._answered = status
        fault = self._fault
        if fault is not None and fault.corrupt and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut is not None:
            content = content[: int(len(content) * fault.cut)]
            self.close_connection = True
        # The client may have gone away during a slow answer.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def json(self):
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise HubError(400, f"The request is not JSON: {error}") from error

    @property
    def names(self):
        """Names of the user and its organisations; empty for a request without a token."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token, ())

    def find(self, kind, repo_id, write=False, content=False):
        """A repository that the request may read, or write, or whose content it may have."""
        names = self.names
        repository = self.hub.repositories.get((_PREFIXES.get(kind, "model"), repo_id))
        owned = repo_id.split("/")[0] in names
        if repository is None or (repository.private and not owned):
            # Whether a private repository exists is nobody else's business.
            raise HubError(404 if names else 401, "Repository not found", "RepoNotFound")
        if write and not owned:
            raise HubError(403 if names else 401, "You don't have the rights to write to this repository")
        if content and repository.gated and not owned and not (names and names[0] in repository.granted):
            raise HubError(403 if names else 401, f"Access to {repo_id} is restricted.", "GatedRepo")
        return repository

    # Accounts

    @_route("GET", "/api/whoami-v2")
    def whoami(self):
        if not self.names:
            raise HubError(401, "Invalid username or password.")
        name, *organisations = self.names
        token = {"type": "access_token", "accessToken": {"displayName": "loopback", "role": "write"}}
        return {"type": "user", "name": name, "orgs": [{"name": org} for org in organisations], "auth": token}

    @_route("GET", _REPO + "/auth-check")
    def auth_check(self, kind, repo_id):
        self.find(kind, repo_id, content=True)
        return {}

    # Repositories

    @_route("POST", "/api/repos/create")
    def create(self):
        wanted, names = self.json(), self.names
        if not names:
            raise HubError(401, "Invalid username or password.")
        namespace = wanted.get("organization") or names[0]
        if namespace not in names:
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
        repo_type, repo_id = wanted.get("type") or "model", f"{namespace}/{wanted['name']}"
        url = f"{self.hub.endpoint}/{'' if repo_type == 'model' else repo_type + 's/'}{repo_id}"
        if (repo_type, repo_id) in self.hub.repositories:
            return 409, json.dumps({"error": "You already created this model repo", "url": url}).encode(), {}
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repositories[repo_type, repo_id] = Repository(repo_id, repo_type, bool(private))
        return {"url": url, "name": repo_id, "id": repo_id}

    @_route("DELETE", "/api/repos/delete")
    def delete(self):
        wanted = self.json()
        repo_type = wanted.get("type") or "model"
        repo_id = f"{wanted.get('organization') or (self.names or ('',))[0]}/{wanted['name']}"
        self.find(f"{repo_type}s", repo_id, write=True)
        del self.hub.repositories[repo_type, repo_id]
        return {}

    @_route("PUT", _REPO + "/settings")
    def settings(self, kind, repo_id):
        repository, wanted = self.find(kind, repo_id, write=True), self.json()
        if "private" in wanted or "visibility" in wanted:
            repository.private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        if "gated" in wanted:
            repository.gated = bool(wanted["gated"])
        return {}

    @_route("GET", "/api/(?P<kind>models|datasets|spaces)")
    def listing(self, kind):
        names = self.names
        return [
            repository.describe()
            for (repo_type, repo_id), repository in sorted(self.hub.repositories.items())
            if repo_type == _PREFIXES[kind]
            and (not repository.private or repo_id.split("/")[0] in names)
            and self.query.get("author", repo_id.split("/")[0]) == repo_id.split("/")[0]
            and self.query.get("search", "") in repo_id
        ]

    @_route("GET", _REPO + "(?:/revision/(?P<revision>[^/]+))?")
    def info(self, kind, repo_id, revision):
        repository = self.find(kind, repo_id)
        answer = repository.describe(revision or "main")
        if self.query.get("blobs"):
            files = repository.resolve(revision or "main").files
            for sibling in answer["siblings"]:
                entry = files[sibling["rfilename"]].describe(sibling["rfilename"])
                sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {**entry["lfs"], "sha256": entry["lfs"]["oid"]}
        return answer

    @_route("GET", _REPO + "/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?")
    def tree(self, kind, repo_id, revision, folder):
        recursive = self.query.get("recursive", "").lower() in ("1", "true")
        return self.find(kind, repo_id, content=True).tree(revision, folder, recursive)

    @_route("POST", _REPO + "/paths-info/(?P<revision>[^/]+)")
    def paths_info(self, kind, repo_id, revision):
        if "json" in self.headers.get("Content-Type", ""):
            wanted = self.json().get("paths", [])
        else:
            wanted = parse_qs(self.body.decode()).get("paths", [])
        files = self.find(kind, repo_id, content=True).resolve(revision).files
        return [files[path].describe(path) for path in wanted if path in files]

    @_route("GET", _REPO + "/commits/(?P<revision>[^/]+)")
    def commits(self, kind, repo_id, revision):
        return [
            {
                "id": commit.sha,
                "title": commit.title,
                "message": commit.description,
                "date": commit.date,
                "authors": [],
            }
            for commit in self.find(kind, repo_id).history(revision)
        ]

    # Branches and tags

    @_route("GET", _REPO + "/refs")
    def refs(self, kind, repo_id):
        repository = self.find(kind, repo_id)

        def listed(kind, refs):
            return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in refs.items()]

        return {
            "branches": listed("heads", repository.branches),
            "tags": listed("tags", repository.tags),
            "converts": [],
        }

    @_route("POST", _REPO + "/branch/(?P<name>[^/]+)")
    def create_branch(self, kind, repo_id, name):
        repository = self.find(kind, repo_id, write=True)
        if name in repository.branches:
            raise HubError(409, f"Reference already exists: {name}")
        repository.branches[name] = repository.resolve(self.json().get("startingPoint", "main")).sha
        return {}

    @_route("DELETE", _REPO + "/(?P<what>branch|tag)/(?P<name>[^/]+)")
    def delete_ref(self, kind, repo_id, what, name):
        repository = self.find(kind, repo_id, write=True)
        refs = repository.branches if what == "branch" else repository.tags
        if refs.pop(name, None) is None:
            raise HubError(404, f"Reference does not exist: {name}", "RevisionNotFound")
        repository.forget_unreachable()
        return {}

    @_route("POST", _REPO + "/tag/(?P<revision>[^/]+)")
    def create_tag(self, kind, repo_id, revision):
        repository, name = self.find(kind, repo_id, write=True), self.json()["tag"]
        if name in repository.tags:
            raise HubError(409, f"Tag already exists: {name}")
        repository.tags[name] = repository.resolve(revision).sha
        return {}

    @_route("POST", _REPO + "/super-squash/(?P<branch>[^/]+)")
    def super_squash(self, kind, repo_id, branch):
        self.find(kind, repo_id, write=True).squash(branch, self.json().get("message"))
        return {}

    # Uploads

    @_route("POST", "/api/validate-yaml")
    def validate_yaml(self):
        match, errors = _FRONT_MATTER.match(self.json().get("content", "").replace("\r\n", "\n")), []
        if match:
            try:
                if not isinstance(yaml.safe_load(match[1]), dict):
                    errors.append({"message": "The metadata has to be a mapping."})
            except yaml.YAMLError as error:
                errors.append({"message": str(error)})
        content = json.dumps({"errors": errors, "warnings": []}).encode()
        return 400 if errors else 200, content, {"Content-Type": "application/json"}

    @_route("POST", _REPO + "/preupload/(?P<branch>[^/]+)")
    def preupload(self, kind, repo_id, branch):
        repository = self.find(kind, repo_id, write=True)
        present, answer = repository.resolve(branch).files, []
        for file in self.json()["files"]:
            mode = repository.upload_mode(file["path"], file["size"], base64.b64decode(file["sample"]))
            entry = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
            if file["path"] in present:
                entry["oid"] = present[file["path"]].etag
            answer.append(entry)
        return {"files": answer}

    @_route("POST", r"/(?:(?P<kind>datasets|spaces)/)?(?P<repo_id>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
    def lfs_batch(self, kind, repo_id):
        repository, answer = self.find(kind, repo_id, write=True), []
        for wanted in self.json()["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in repository.lfs:
                path = f"/lfs/{repository.repo_type}s/{quote(repo_id)}/{wanted['oid']}"
                # A signed address on the Hub: the upload itself carries no token.
                entry["actions"] = {"upload": {"href": self.hub.endpoint + path, "header": {}}}
            answer.append(entry)
        return {"transfer": "basic", "objects": answer}

    @_route("PUT", "/lfs/(?P<kind>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})")
    def lfs_put(self, kind, repo_id, oid):
        if Blob(self.body).sha256 != oid:
            raise HubError(400, f"The content has the hash {Blob(self.body).sha256}, not {oid}.")
        self.hub.repository(repo_id, _PREFIXES[kind]).lfs[oid] = self.body
        return {}

    @_route("POST", _REPO + "/commit/(?P<branch>[^/]+)")
    def commit(self, kind, repo_id, branch):
        repository = self.find(kind, repo_id, write=True)
        try:
            lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        except ValueError as error:
            raise HubError(400, f"A line of the commit is not JSON: {error}") from error
        sha = repository.commit(branch, lines).sha
        return {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}"}

    # Downloads

    @_route("GET", _FILE)
    def file(self, kind, repo_id, revision, path):
        repository = self.find(kind, repo_id, content=True)
        commit, blob = repository.file(revision, path)
        headers = {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        headers["Content-Type"] = "application/octet-stream"
        if blob.is_lfs:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return 200, blob.data, headers
        size = len(blob.data)
        start, stop = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1) + 1
        if start >= size:
            headers["Content-Range"] = f"bytes */{size}"
            return 416, b"", headers
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, blob.data[start:stop], headers
