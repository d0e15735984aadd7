# SPDX-License-Identifier: MIT OR Apache-2.0
"""The language codes of M2M-100 and of its descendant for WMT21, in the order of their ids.

The orders are those of the published checkpoints and part of their format.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_NAMES = """
af=Afrikaans am=Amharic ar=Arabic ast=Asturian az=Azerbaijani ba=Bashkir be=Belarusian bg=Bulgarian bn=Bengali br=Breton
bs=Bosnian ca=Catalan ceb=Cebuano cs=Czech cy=Welsh da=Danish de=German el=Greek en=English es=Spanish et=Estonian
fa=Persian ff=Fulah fi=Finnish fr=French fy=Western_Frisian ga=Irish gd=Scottish_Gaelic gl=Galician gu=Gujarati ha=Hausa
he=Hebrew hi=Hindi hr=Croatian ht=Haitian_Creole hu=Hungarian hy=Armenian id=Indonesian ig=Igbo ilo=Ilocano is=Icelandic
it=Italian ja=Japanese jv=Javanese ka=Georgian kk=Kazakh km=Khmer kn=Kannada ko=Korean lb=Luxembourgish lg=Ganda
ln=Lingala lo=Lao lt=Lithuanian lv=Latvian mg=Malagasy mk=Macedonian ml=Malayalam mn=Mongolian mr=Marathi ms=Malay
my=Burmese ne=Nepali nl=Dutch no=Norwegian ns=Northern_Sotho oc=Occitan or=Odia pa=Panjabi pl=Polish ps=Pashto
pt=Portuguese ro=Romanian ru=Russian sd=Sindhi si=Sinhala sk=Slovak sl=Slovenian so=Somali sq=Albanian sr=Serbian
ss=Swati su=Sundanese sv=Swedish sw=Swahili ta=Tamil th=Thai tl=Tagalog tn=Tswana tr=Turkish uk=Ukrainian ur=Urdu
uz=Uzbek vi=Vietnamese wo=Wolof xh=Xhosa yi=Yiddish yo=Yoruba zh=Chinese zu=Zulu
"""

M2M_LANGUAGE_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {code: name.replace("_", " ") for code, name in (entry.split("=") for entry in _NAMES.split())}
)
"""English names, by code, in the order of M2M-100's ids."""

M2M_LANGUAGES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"m2m100": tuple(M2M_LANGUAGE_NAMES), "wmt21": ("en", "ha", "is", "ja", "cs", "ru", "zh", "de")}
)
"""The codes in the order of their ids, by what ``language_codes`` of ``tokenizer_config.json`` says."""


def language_token(code: str) -> str:
    """Return the vocabulary's entry for a code: ``__fr__`` for ``fr``."""
    return f"__{code}__"
