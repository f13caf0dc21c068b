"""Speculative decoding: drafts that are proposed, verified in one step, kept if right."""
