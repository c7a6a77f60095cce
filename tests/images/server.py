"""A local HTTP server that can do what servers do: continue, break off, refuse, be busy."""

import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Site:
    """What the server serves and how; ``asked`` are the paths and ranges that it was asked for."""

    def __init__(self, files):
        self.files = files
        self.ranges = True  # continue where a client asks to
        self.break_after = []  # bytes of the body after which the next answers break off
        self.answers = []  # status codes of the next answers, instead of the file
        self.asked = []
        self.url = ""


@contextmanager
def serving(files):
    site = Site(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            span = self.headers.get("Range")
            site.asked.append((self.path, span))
            if site.answers and (code := site.answers.pop(0)):
                self.send_error(code)
                return
            body = site.files.get(self.path.lstrip("/"))
            if body is None:
                self.send_error(404)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", span)[1]) if span and site.ranges else 0
            if start >= len(body) and start:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            rest = body[start:]
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            if site.break_after:
                rest = rest[: site.break_after.pop(0)]
            self.wfile.write(rest)
            self.close_connection = True

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
