"""What autograd saves: its name, its role, what is kept of it, and the handle that gives it back."""

from .accounting import LOG_SOFTMAX, Footprint, ReportRow, parts_of
from .backward_rules import exponent_of, jumps
from .batches import batch_size, fixes_rows, map_tensors, may_hold_adjacency, samples_of, tensors_of
from .checkpoint import recomputing
from .checkpoint_report import told_of_checkpoints
from .clock import Clock
from .derived import STARTS, note_saved_in_block, origins_of
from .draws import Draw, StoredAgain
from .encoder import Encoder
from .engine import LearntNames, SavedTensorHooks, kept_exactly, nothing_kept, read_once, replaying
from .function_calls import GivenToFunction, given_to_functions
from .handles import Content, Noted, Recorded, Replaceable, ReplayError, Stored, View, decoded, stored_of
from .inlined import check_inlined
from .naming import LEAVES_CHECKPOINT, RECOMPUTED, WORKSPACE, edge_to, origin, producer
from .own_hooks import Calling, Registration, after_forward, before_forward, on_interrupt
from .parameters import made_from_parameters
from .read_once import ReadOnce
from .replay import Replay, Replayed, firsts_of, made_again
from .roles import BACKWARDS, OperatorObserver
from .selective import Adding, Results, Taking, Way, policy_of, running_with, shares_memory
from .streamed import Streamed

__all__ = [
    "BACKWARDS",
    "LEAVES_CHECKPOINT",
    "LOG_SOFTMAX",
    "RECOMPUTED",
    "STARTS",
    "WORKSPACE",
    "Adding",
    "Calling",
    "Clock",
    "Content",
    "Draw",
    "Encoder",
    "Footprint",
    "GivenToFunction",
    "LearntNames",
    "Noted",
    "OperatorObserver",
    "ReadOnce",
    "Recorded",
    "Registration",
    "Replaceable",
    "Replay",
    "ReplayError",
    "Replayed",
    "ReportRow",
    "Results",
    "SavedTensorHooks",
    "Stored",
    "StoredAgain",
    "Streamed",
    "Taking",
    "View",
    "Way",
    "after_forward",
    "batch_size",
    "before_forward",
    "check_inlined",
    "decoded",
    "edge_to",
    "exponent_of",
    "firsts_of",
    "fixes_rows",
    "given_to_functions",
    "jumps",
    "kept_exactly",
    "made_again",
    "made_from_parameters",
    "map_tensors",
    "may_hold_adjacency",
    "note_saved_in_block",
    "nothing_kept",
    "on_interrupt",
    "origin",
    "origins_of",
    "parts_of",
    "policy_of",
    "producer",
    "read_once",
    "recomputing",
    "replaying",
    "running_with",
    "samples_of",
    "shares_memory",
    "stored_of",
    "tensors_of",
    "told_of_checkpoints",
]
