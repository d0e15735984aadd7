# SPDX-License-Identifier: MIT OR Apache-2.0
"""The 202 language codes of NLLB-200 (FLORES-200 codes) in the order of their ids, and near matches of any code.

The order is that of the published checkpoints and part of their format: it is alphabetical, apart from a few codes
(``pes_Arab``, ``kmr_Latn``, ``plt_Latn`` and others) that stand where an older code of the same language stood.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from metrale.nllb.m2m_languages import M2M_LANGUAGE_NAMES

LANGUAGE_NAMES: dict[str, str] = {
    "ace_Arab": "Acehnese (Arabic script)",
    "ace_Latn": "Acehnese (Latin script)",
    "acm_Arab": "Mesopotamian Arabic",
    "acq_Arab": "Ta'izzi-Adeni Arabic",
    "aeb_Arab": "Tunisian Arabic",
    "afr_Latn": "Afrikaans",
    "ajp_Arab": "South Levantine Arabic",
    "aka_Latn": "Akan",
    "amh_Ethi": "Amharic",
    "apc_Arab": "North Levantine Arabic",
    "arb_Arab": "Modern Standard Arabic",
    "ars_Arab": "Najdi Arabic",
    "ary_Arab": "Moroccan Arabic",
    "arz_Arab": "Egyptian Arabic",
    "asm_Beng": "Assamese",
    "ast_Latn": "Asturian",
    "awa_Deva": "Awadhi",
    "ayr_Latn": "Central Aymara",
    "azb_Arab": "South Azerbaijani",
    "azj_Latn": "North Azerbaijani",
    "bak_Cyrl": "Bashkir",
    "bam_Latn": "Bambara",
    "ban_Latn": "Balinese",
    "bel_Cyrl": "Belarusian",
    "bem_Latn": "Bemba",
    "ben_Beng": "Bengali",
    "bho_Deva": "Bhojpuri",
    "bjn_Arab": "Banjar (Arabic script)",
    "bjn_Latn": "Banjar (Latin script)",
    "bod_Tibt": "Standard Tibetan",
    "bos_Latn": "Bosnian",
    "bug_Latn": "Buginese",
    "bul_Cyrl": "Bulgarian",
    "cat_Latn": "Catalan",
    "ceb_Latn": "Cebuano",
    "ces_Latn": "Czech",
    "cjk_Latn": "Chokwe",
    "ckb_Arab": "Central Kurdish",
    "crh_Latn": "Crimean Tatar",
    "cym_Latn": "Welsh",
    "dan_Latn": "Danish",
    "deu_Latn": "German",
    "dik_Latn": "Southwestern Dinka",
    "dyu_Latn": "Dyula",
    "dzo_Tibt": "Dzongkha",
    "ell_Grek": "Greek",
    "eng_Latn": "English",
    "epo_Latn": "Esperanto",
    "est_Latn": "Estonian",
    "eus_Latn": "Basque",
    "ewe_Latn": "Ewe",
    "fao_Latn": "Faroese",
    "pes_Arab": "Western Persian",
    "fij_Latn": "Fijian",
    "fin_Latn": "Finnish",
    "fon_Latn": "Fon",
    "fra_Latn": "French",
    "fur_Latn": "Friulian",
    "fuv_Latn": "Nigerian Fulfulde",
    "gla_Latn": "Scottish Gaelic",
    "gle_Latn": "Irish",
    "glg_Latn": "Galician",
    "grn_Latn": "Guarani",
    "guj_Gujr": "Gujarati",
    "hat_Latn": "Haitian Creole",
    "hau_Latn": "Hausa",
    "heb_Hebr": "Hebrew",
    "hin_Deva": "Hindi",
    "hne_Deva": "Chhattisgarhi",
    "hrv_Latn": "Croatian",
    "hun_Latn": "Hungarian",
    "hye_Armn": "Armenian",
    "ibo_Latn": "Igbo",
    "ilo_Latn": "Ilocano",
    "ind_Latn": "Indonesian",
    "isl_Latn": "Icelandic",
    "ita_Latn": "Italian",
    "jav_Latn": "Javanese",
    "jpn_Jpan": "Japanese",
    "kab_Latn": "Kabyle",
    "kac_Latn": "Jingpho",
    "kam_Latn": "Kamba",
    "kan_Knda": "Kannada",
    "kas_Arab": "Kashmiri (Arabic script)",
    "kas_Deva": "Kashmiri (Devanagari script)",
    "kat_Geor": "Georgian",
    "knc_Arab": "Central Kanuri (Arabic script)",
    "knc_Latn": "Central Kanuri (Latin script)",
    "kaz_Cyrl": "Kazakh",
    "kbp_Latn": "Kabiyè",
    "kea_Latn": "Kabuverdianu",
    "khm_Khmr": "Khmer",
    "kik_Latn": "Kikuyu",
    "kin_Latn": "Kinyarwanda",
    "kir_Cyrl": "Kyrgyz",
    "kmb_Latn": "Kimbundu",
    "kon_Latn": "Kikongo",
    "kor_Hang": "Korean",
    "kmr_Latn": "Northern Kurdish",
    "lao_Laoo": "Lao",
    "lvs_Latn": "Standard Latvian",
    "lij_Latn": "Ligurian",
    "lim_Latn": "Limburgish",
    "lin_Latn": "Lingala",
    "lit_Latn": "Lithuanian",
    "lmo_Latn": "Lombard",
    "ltg_Latn": "Latgalian",
    "ltz_Latn": "Luxembourgish",
    "lua_Latn": "Luba-Kasai",
    "lug_Latn": "Ganda",
    "luo_Latn": "Luo",
    "lus_Latn": "Mizo",
    "mag_Deva": "Magahi",
    "mai_Deva": "Maithili",
    "mal_Mlym": "Malayalam",
    "mar_Deva": "Marathi",
    "min_Latn": "Minangkabau",
    "mkd_Cyrl": "Macedonian",
    "plt_Latn": "Plateau Malagasy",
    "mlt_Latn": "Maltese",
    "mni_Beng": "Meitei",
    "khk_Cyrl": "Halh Mongolian",
    "mos_Latn": "Mossi",
    "mri_Latn": "Maori",
    "zsm_Latn": "Standard Malay",
    "mya_Mymr": "Burmese",
    "nld_Latn": "Dutch",
    "nno_Latn": "Norwegian Nynorsk",
    "nob_Latn": "Norwegian Bokmål",
    "npi_Deva": "Nepali",
    "nso_Latn": "Northern Sotho",
    "nus_Latn": "Nuer",
    "nya_Latn": "Nyanja",
    "oci_Latn": "Occitan",
    "gaz_Latn": "West Central Oromo",
    "ory_Orya": "Odia",
    "pag_Latn": "Pangasinan",
    "pan_Guru": "Eastern Panjabi",
    "pap_Latn": "Papiamento",
    "pol_Latn": "Polish",
    "por_Latn": "Portuguese",
    "prs_Arab": "Dari",
    "pbt_Arab": "Southern Pashto",
    "quy_Latn": "Ayacucho Quechua",
    "ron_Latn": "Romanian",
    "run_Latn": "Rundi",
    "rus_Cyrl": "Russian",
    "sag_Latn": "Sango",
    "san_Deva": "Sanskrit",
    "sat_Beng": "Santali",
    "scn_Latn": "Sicilian",
    "shn_Mymr": "Shan",
    "sin_Sinh": "Sinhala",
    "slk_Latn": "Slovak",
    "slv_Latn": "Slovenian",
    "smo_Latn": "Samoan",
    "sna_Latn": "Shona",
    "snd_Arab": "Sindhi",
    "som_Latn": "Somali",
    "sot_Latn": "Southern Sotho",
    "spa_Latn": "Spanish",
    "als_Latn": "Tosk Albanian",
    "srd_Latn": "Sardinian",
    "srp_Cyrl": "Serbian",
    "ssw_Latn": "Swati",
    "sun_Latn": "Sundanese",
    "swe_Latn": "Swedish",
    "swh_Latn": "Swahili",
    "szl_Latn": "Silesian",
    "tam_Taml": "Tamil",
    "tat_Cyrl": "Tatar",
    "tel_Telu": "Telugu",
    "tgk_Cyrl": "Tajik",
    "tgl_Latn": "Tagalog",
    "tha_Thai": "Thai",
    "tir_Ethi": "Tigrinya",
    "taq_Latn": "Tamasheq (Latin script)",
    "taq_Tfng": "Tamasheq (Tifinagh script)",
    "tpi_Latn": "Tok Pisin",
    "tsn_Latn": "Tswana",
    "tso_Latn": "Tsonga",
    "tuk_Latn": "Turkmen",
    "tum_Latn": "Tumbuka",
    "tur_Latn": "Turkish",
    "twi_Latn": "Twi",
    "tzm_Tfng": "Central Atlas Tamazight",
    "uig_Arab": "Uyghur",
    "ukr_Cyrl": "Ukrainian",
    "umb_Latn": "Umbundu",
    "urd_Arab": "Urdu",
    "uzn_Latn": "Northern Uzbek",
    "vec_Latn": "Venetian",
    "vie_Latn": "Vietnamese",
    "war_Latn": "Waray",
    "wol_Latn": "Wolof",
    "xho_Latn": "Xhosa",
    "ydd_Hebr": "Eastern Yiddish",
    "yor_Latn": "Yoruba",
    "yue_Hant": "Yue Chinese (Cantonese)",
    "zho_Hans": "Chinese (simplified script)",
    "zho_Hant": "Chinese (traditional script)",
    "zul_Latn": "Zulu",
}
"""English names, by code, in the order of the ids."""

FLORES_200: tuple[str, ...] = tuple(LANGUAGE_NAMES)
"""The codes in the order of their ids; the first has the id that follows the last SentencePiece piece."""


def language_name(code: str) -> str:
    """Return the English name of a code of NLLB-200 or M2M-100; of any other, nothing."""
    return LANGUAGE_NAMES.get(code) or M2M_LANGUAGE_NAMES.get(code, "")


# What FLORES-200 does not have: ISO 639 codes of two letters, of macrolanguages, bibliographic ones, and some names.
_OTHER_NAMES = """
af=afr ak=aka am=amh ar=arb,arz,ary ara=arb,arz,ary as=asm ay=ayr aym=ayr az=azj,azb aze=azj,azb ba=bak be=bel bg=bul
bm=bam bn=ben bo=bod tib=bod bs=bos ca=cat cs=ces cze=ces cy=cym wel=cym da=dan de=deu ger=deu dz=dzo ee=ewe el=ell
gre=ell en=eng eo=epo es=spa et=est ekk=est eu=eus baq=eus fa=pes,prs fas=pes,prs per=pes,prs ff=fuv ful=fuv fi=fin
fil=tgl fj=fij fo=fao fr=fra fre=fra ga=gle gd=gla gl=glg gn=grn gu=guj ha=hau he=heb iw=heb hi=hin hr=hrv ht=hat
hu=hun hy=hye arm=hye id=ind in=ind ig=ibo is=isl ice=isl it=ita ja=jpn jv=jav jw=jav ka=kat geo=kat kg=kon ki=kik
kk=kaz km=khm kn=kan ko=kor kr=knc kau=knc ks=kas ku=kmr,ckb kur=kmr,ckb ky=kir lb=ltz lg=lug li=lim ln=lin lo=lao
lt=lit lv=lvs lav=lvs mg=plt mlg=plt mi=mri mao=mri mk=mkd mac=mkd ml=mal mn=khk mon=khk mr=mar ms=zsm msa=zsm may=zsm
mt=mlt my=mya bur=mya nb=nob ne=npi nep=npi nl=nld dut=nld nn=nno no=nob,nno nor=nob,nno ny=nya oc=oci om=gaz orm=gaz
or=ory ori=ory pa=pan pl=pol ps=pbt pus=pbt pt=por qu=quy que=quy rn=run ro=ron rum=ron ru=rus rw=kin sa=san sc=srd
sd=snd sg=sag si=sin sk=slk slo=slk sl=slv sm=smo sn=sna so=som sq=als sqi=als alb=als sr=srp ss=ssw st=sot su=sun
sv=swe sw=swh swa=swh ta=tam te=tel tg=tgk th=tha ti=tir tk=tuk tl=tgl tn=tsn tr=tur ts=tso tt=tat tw=twi ug=uig
uk=ukr ur=urd uz=uzn uzb=uzn vi=vie wo=wol xh=xho yi=ydd yid=ydd yo=yor zh=zho cmn=zho chi=zho zu=zul
br=bre fy=fry ns=nso
arabic=arb,arz,ary cantonese=yue chinese=zho farsi=pes,prs flemish=nld mandarin=zho
"""
_PARTS = {short: parts.split(",") for short, parts in (entry.split("=") for entry in _OTHER_NAMES.split())}

_LONGEST_GUESS = 64  # longer texts are no misspelt codes, and difflib's time grows with their length


def near_languages(text: str, languages: Collection[str] = FLORES_200, limit: int = 3) -> tuple[str, ...]:
    """Codes that somebody who typed ``text`` may have meant.

    Tried in turn, and the first that finds anything decides: another spelling of the code (``fra-latn``), an
    ISO 639 code with or without a region (``fr``, ``pt-BR``, ``fra``), an English name (``French``), a misspelling of a
    code or a name.

    Parameters
    ----------
    text : str
        What was typed.
    languages : collection of str
        The codes to choose from.
    limit : int
        The most codes to return.

    Returns
    -------
    tuple of str
        Members of ``languages``, the likeliest first. Empty when nothing is close.
    """
    wanted = text.strip().strip("_").replace("-", "_").casefold()
    if not wanted or len(wanted) > _LONGEST_GUESS:
        return ()
    names = {code: language_name(code).casefold() for code in languages if language_name(code)}
    found = (
        [code for code in languages if code.casefold() == wanted]
        or [code for part in _parts(wanted) for code in languages if part in _parts(code)]
        or [code for code, name in names.items() if name == wanted]
        or [code for code, name in names.items() if wanted in name.partition(" (")[0].split()]
        or _misspelt(wanted, languages, names, limit)
    )
    return tuple(found[:limit])


def _parts(code: str) -> list[str]:
    """Return the ISO 639-3 codes that a code of any kind stands for."""
    first = code.split("_")[0].casefold()
    return _PARTS.get(first, [first])


def _misspelt(wanted: str, languages: Collection[str], names: dict[str, str], limit: int) -> list[str]:
    spellings = {code.casefold(): code for code in languages} | {name: code for code, name in names.items()}
    close = difflib.get_close_matches(wanted, spellings, n=2 * limit, cutoff=0.7)
    return list(dict.fromkeys(spellings[spelling] for spelling in close))
