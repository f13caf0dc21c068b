"""The chat template of an audited model."""

from __future__ import annotations

from localgen.audit.teacher_forcing import ForcedModel
from localgen.backends.errors import InvalidRequest
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.template import ChatTemplate, PromptTemplate, TemplateLoader


def load_template(forced: ForcedModel) -> PromptTemplate:
    """The model's own template, in a sandbox.

    Raises InvalidRequest if it has none, LoadFailed if it does not compile.
    """
    model = forced.model
    sandbox = Sandbox(ChatTemplate)
    loader = TemplateLoader(sandbox, None, model.template, forced.tokenizer, model.path)
    template = loader.wait()
    if template is None:
        raise InvalidRequest(
            f"{model.path.name} has no chat template to read stored chats with: "
            "give a file with --text",
            param="model",
        )
    return template
