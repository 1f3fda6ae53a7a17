# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext hub-server`"""

import threading
from typing import Annotated

import typer


EXAMPLE = "diffusers-ext hub-server --port 8765 --organisation my-org"


def run(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any free one.", min=0, max=65535)] = 8765,
    organisation: Annotated[list[str], typer.Option(help="Organisation to publish to; may be repeated.")] = ("org",),
):
    """Run a Hub on this machine, to try publishing offline; what it holds is gone when it stops."""
    from diffusers_ext.testing import HubServer

    try:
        server = HubServer(port, {HubServer.DEFAULT_TOKEN: ("me", *organisation)})
    except OSError as error:
        raise OSError(f"Port {port} cannot be used: {error.strerror}. Choose another one, or 0.") from error
    with server:
        print(f"A Hub runs at {server.endpoint} until you press Ctrl-C. In another terminal:\n")
        for name, value in server.environment.items():
            print(f"export {name}={value}")
        print("\ndiffusers-ext publish FOLDER " + f"{organisation[0]}/NAME", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("\nStopped.")
