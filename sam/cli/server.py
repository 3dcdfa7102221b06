"""The server at the other end: one JSON request at a time, and what its refusals mean.

Owns the HTTP and the words for what goes wrong. Must never follow a redirect (it would carry the
API key elsewhere), and never show the key.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from sam.cli.errors import CliError, Exit

_START_IT = "start it with --radix-cache-backend sam (docs/operating.md)"
_ADMIN = (
    "pass --api-key or set SAM_API_KEY; what lists sessions needs the admin key where the"
    " server has one (--admin-api-key), hints need the key that the agents use"
)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Server:
    """One server. `url` with or without the `/v1` of an OpenAI base URL."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise CliError(Exit.USAGE, f"--url {url!r} is no http:// or https:// address")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_NoRedirect)

    def get(self, path: str, **query: object) -> Any:
        """JSON of `path`; None values are left out of the query. Raises CliError."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask(path + (f"?{urllib.parse.urlencode(given)}" if given else ""), None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON of `path` for this body. Raises CliError."""
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, data: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, data=data)
        request.add_header("Content-Type", "application/json")
        if self._api_key:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error.read()) from None
        except (TimeoutError, urllib.error.URLError) as error:
            raise self._silence(getattr(error, "reason", error)) from None
        except (http.client.HTTPException, ValueError):
            raise self._not_sam("its answer is no JSON over HTTP") from None
        except OSError as error:
            raise self._silence(error) from None

    def _silence(self, reason: object) -> CliError:
        if isinstance(reason, TimeoutError):
            text = f"{self.url} did not answer in {self._timeout_s:g} s"
            return CliError(Exit.NO_SERVER, text, "is it overloaded? try a longer --timeout")
        text = getattr(reason, "strerror", None) or str(reason)
        remedy = "is it running, and is --url (or SAM_URL) right?"
        return CliError(Exit.NO_SERVER, f"no server at {self.url}: {text}", remedy)

    def _refusal(self, status: int, raw: bytes) -> CliError:
        text = _message_of(raw)
        if status in (401, 403):
            return CliError(Exit.REFUSED, f"{self.url} refuses the API key ({status})", _ADMIN)
        if status == 404 and text.startswith("unknown message_id"):
            return CliError(Exit.UNKNOWN, text)
        if status in (404, 405, 501) or 300 <= status < 400:
            return self._not_sam(f"it answered {status}")
        if status in (400, 413, 422):
            return CliError(Exit.USAGE, f"{self.url} calls the request malformed: {text}")
        remedy = "try again" if status == 503 else "see the server's log"
        return CliError(Exit.NO_SERVER, f"{self.url} answered {status}: {text}", remedy)

    def _not_sam(self, why: str) -> CliError:
        text = f"{self.url} is no SGLang server with sam: {why}"
        return CliError(Exit.NOT_SAM, text, _START_IT)


def _message_of(raw: bytes) -> str:
    """What an error body says, at most 300 characters."""
    text = raw.decode(errors="replace")
    try:
        body = json.loads(text)
        found = body.get("error", body.get("message", body.get("detail", text)))
        text = found.get("message", text) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError):
        if text.lstrip().startswith("<"):
            return "a page of HTML"
    return text[:300].strip()
