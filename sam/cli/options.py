"""Options that several commands share.

Owns their names, environment variables and help. Must never hold a secret.
"""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:30000"

Url = Annotated[
    str, typer.Option("--url", envvar="SAM_URL", help="The server; also an OpenAI base URL.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="SAM_API_KEY", help="Better set as the variable: others see options."
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds to wait for each answer.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="The session's id.")]
