"""Start a chat: load the model, prepare the line editor, run the loop."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

from rich.text import Text

from localgen.backends.terminal_text import one_line
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.repl.line_reader import create_line_reader
from localgen.repl.repl import Repl
from localgen.repl.typed_ahead import hide_typed_ahead

if TYPE_CHECKING:
    from localgen.chat.chat_storage import ChatStorage
    from localgen.client import Client
    from localgen.mcp_tools.chat_tools import ChatTools
    from localgen.repl.load_progress import LoadProgressLine


def start_chat(
    client: Client,
    progress_line: LoadProgressLine,
    model: str | None,
    options: ModelOptions,
    storage: ChatStorage,
    tools: ChatTools,
) -> None:
    """Load the model, then chat on the console of `progress_line` until the user leaves.

    Raises LocalgenError if the model cannot be loaded.
    """
    session = ChatSession(client, storage.state_dir, options, tools)
    session.set_conversation(storage.record.conversation.with_system(options.system))
    console = progress_line.console
    with hide_typed_ahead():
        with progress_line:
            client.connect()
            # imported while the model is loaded: earlier, it would delay the server
            editor = threading.Thread(
                target=importlib.import_module, args=(f"{__package__}.prompt",)
            )
            editor.start()
            session.load(model, progress_line.update)
        editor.join()
        failure = f"conversation not stored: {storage.failure}" if storage.failure else ""
        for line in filter(None, (failure, storage.warning)):
            console.print(Text(one_line(line), style="yellow"))
        recorder = storage.recorder(session)
        reader = create_line_reader(session, console, keeps_prompts=storage.keeps_history)
        Repl(
            *(session, console, reader.read, recorder, progress_line, storage.failure),
            ask=reader.ask,
            keep=reader.keep,
        ).run()
