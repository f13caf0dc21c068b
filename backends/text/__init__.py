"""Text processing shared by all runners: prompts, grammars, detokenization, response parsing."""
