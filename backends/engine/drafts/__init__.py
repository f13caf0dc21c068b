"""Speculation: tokens that are proposed, verified in one step, and kept where they are right."""
