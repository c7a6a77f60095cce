"""The methods by their names."""

from ccssl.methods.base import Method
from ccssl.methods.ccssl import CCSSLDiff, CCSSLProp
from ccssl.methods.cssl import CSSL
from ccssl.methods.fixmatch import FixMatch, FixMatchDA
from ccssl.methods.flexmatch import FlexMatch
from ccssl.methods.pseudo_label import PseudoLabel
from ccssl.methods.supervised import Supervised
from ccssl.methods.uda import UDA

METHODS: dict[str, type[Method]] = {
    "supervised": Supervised,
    "pseudo-label": PseudoLabel,
    "uda": UDA,
    "fixmatch": FixMatch,
    "fixmatch-da": FixMatchDA,
    "flexmatch": FlexMatch,
    "cssl": CSSL,
    "ccssl-diff": CCSSLDiff,
    "ccssl-prop": CCSSLProp,
}
