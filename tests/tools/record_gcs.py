"""Records what real TensorStore, gcsfs and Orbax ask of a Cloud Storage emulator, for tests/gcs_double/tests/replay.rs.

    python tests/tools/record_gcs.py tests/gcs_double/tests/recorded.jsonl

One JSON line an exchange, in the order in which the emulator (fake-gcs-server, from requirements/gcs.txt) did them: the
recorder passes on one request at a time. Addresses of this machine are written as http://HOST; nothing else of it is in a
request. Members of answers that differ between any two servers are left out. The clients are separate processes, as their
settings are environment variables.
"""

import argparse
import base64
import contextlib
import http.client
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.request

PYTHON = pathlib.Path(__file__).resolve().parents[1] / "python"
sys.path[:0] = [str(PYTHON), str(PYTHON / "clients")]
import gcs  # noqa: E402
import gcs_clients  # noqa: E402

# What the APIs go by. The rest is about the connection or the client.
REQUEST_HEADERS = ("content-type", "content-range", "range", "x-upload-content-type", "x-upload-content-length")
RESPONSE_HEADERS = ("content-type", "content-range", "range", "location", "x-goog-hash", "x-goog-stored-content-encoding")

# Times, addresses, and what only one of the two servers has. The replay leaves them out, too.
LEFT_OUT = {
    "acl", "defaultEventBasedHold", "etag", "id", "mediaLink", "rewriteToken", "selfLink", "timeCreated",
    "timeStorageClassUpdated", "updated", "versioning", "errors", "message",
}  # fmt: skip

class Recorder(http.server.ThreadingHTTPServer):
    """Passes requests on to the emulator, one at a time, and keeps them."""

    daemon_threads = True

    def __init__(self, emulator):
        super().__init__(("127.0.0.1", 0), Handler)
        self.emulator, self.kept, self.lock = emulator.removeprefix("http://"), [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def plain(self, text):
        # Clients write the host without a scheme within batches.
        for address in (self.url, f"http://{self.emulator}"):
            text = text.replace(address, "http://HOST").replace(address.removeprefix("http://"), "HOST")
        return text

    def answer(self, data):
        try:
            return {"json": pruned(json.loads(self.plain(data.decode())))}
        except ValueError:
            return self.body(data)

    def body(self, data):
        """Bodies as text where they are text."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}
        return {"text": self.plain(text)} if text else {}


def pruned(value):
    if isinstance(value, dict):
        return {name: pruned(inner) for name, inner in value.items() if name not in LEFT_OUT}
    return [pruned(inner) for inner in value] if isinstance(value, list) else value


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def serve(self):
        recorder = self.server
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("transfer-encoding") == "chunked":
            raise NotImplementedError("no client sends chunks")
        with recorder.lock:
            connection = http.client.HTTPConnection(recorder.emulator, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "accept-encoding", "connection")}
            connection.request(self.command, self.path, data, kept)
            response = connection.getresponse()
            answer = response.read()
            chosen = lambda headers, names: {n: recorder.plain(headers[n]) for n in names if headers.get(n)}
            recorder.kept.append(
                {
                    "method": self.command,
                    "target": self.path,
                    "headers": chosen(self.headers, REQUEST_HEADERS),
                    "body": recorder.body(data),
                    "status": response.status,
                    "answer_headers": chosen(response.headers, RESPONSE_HEADERS),
                    "answer": recorder.answer(answer) if "json" in response.headers.get("content-type", "") else recorder.body(answer),
                }
            )
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date"):
                # Uploads go on here, not at the emulator.
                self.send_header(name, value.replace(f"http://{recorder.emulator}", recorder.url))
        self.send_header("Content-Length", str(len(answer)))
        # Clients that were answered elsewhere may have gone.
        with contextlib.suppress(ConnectionError):
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = serve

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory() as folder, gcs.emulator(folder) as emulator:
        recorder = Recorder(emulator)
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        body = json.dumps({"name": "shared"}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{recorder.url}/storage/v1/b?project=p", body)).close()
        for name, code in gcs_clients.ALL.items():
            start = len(recorder.kept)
            subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env={**os.environ, **gcs.client_environment(recorder.url)})
            print(f"{name}: {len(recorder.kept) - start} exchanges")
    lines = [json.dumps(exchange, separators=(",", ":")) for exchange in recorder.kept]
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
