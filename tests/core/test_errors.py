"""An error carries what happened, and a hint that helps."""

from __future__ import annotations

from ingot.core.errors import ConfigError, IngotError, OpError, UnknownName


def test_every_error_is_an_ingot_error_with_both_parts() -> None:
    for cls in (IngotError, ConfigError, OpError):
        error = cls("the disk is full", hint="make room")
        assert isinstance(error, IngotError)
        assert (error.message, error.hint) == ("the disk is full", "make room")
        assert str(error) == "the disk is full\n  hint: make room"


def test_unknown_name_suggests_the_nearest_and_lists_all_sorted() -> None:
    error = UnknownName("optimizer", "admaw", ["muon", "adamw"])
    assert error.message == "unknown optimizer 'admaw'"
    assert error.hint == "did you mean 'adamw'? valid: adamw, muon"
    assert error.name == "admaw"


def test_unknown_name_suggests_nothing_when_nothing_is_near() -> None:
    assert UnknownName("verb", "zzz", ["train", "serve"]).hint == "valid: serve, train"
