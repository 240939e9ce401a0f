"""Which country each cloud region lies in, and which countries make up EU and EEA. Facts, no policy.

AWS, Azure and Google Cloud name their regions without overlap, so a region's name is enough. A region that
is not listed lies in no jurisdiction that we know of.
"""

from __future__ import annotations

_EU = """
AT BE BG CY CZ DE DK EE ES FI FR GR HR HU IE IT LT LU LV MT NL PL PT RO SE SI SK
"""
_COUNTRIES = """
AD AE AF AG AI AL AM AO AQ AR AS AT AU AW AX AZ BA BB BD BE BF BG BH BI BJ BL BM BN BO BQ BR BS BT
BV BW BY BZ CA CC CD CF CG CH CI CK CL CM CN CO CR CU CV CW CX CY CZ DE DJ DK DM DO DZ EC EE EG EH
ER ES ET FI FJ FK FM FO FR GA GB GD GE GF GG GH GI GL GM GN GP GQ GR GS GT GU GW GY HK HM HN HR HT
HU ID IE IL IM IN IO IQ IR IS IT JE JM JO JP KE KG KH KI KM KN KP KR KW KY KZ LA LB LC LI LK LR LS
LT LU LV LY MA MC MD ME MF MG MH MK ML MM MN MO MP MQ MR MS MT MU MV MW MX MY MZ NA NC NE NF NG NI
NL NO NP NR NU NZ OM PA PE PF PG PH PK PL PM PN PR PS PT PW PY QA RE RO RS RU RW SA SB SC SD SE SG
SH SI SJ SK SL SM SN SO SR SS ST SV SX SY SZ TC TD TF TG TH TJ TK TL TM TN TO TR TT TV TW TZ UA UG
UM US UY UZ VA VC VE VG VI VN VU WF WS YE YT ZA ZM ZW
"""
_REGIONS = """
AE: me-central-1 uaecentral uaenorth
AT: austriaeast
AU: ap-southeast-2 ap-southeast-4 australia-southeast1 australia-southeast2 australiacentral
    australiacentral2 australiaeast australiasoutheast
BE: europe-west1
BH: me-south-1
BR: brazilsouth brazilsoutheast sa-east-1 southamerica-east1
CA: ca-central-1 ca-west-1 canadacentral canadaeast northamerica-northeast1 northamerica-northeast2
CH: eu-central-2 europe-west6 switzerlandnorth switzerlandwest
CL: chilecentral southamerica-west1
CN: chinaeast chinaeast2 chinanorth chinanorth2 chinanorth3 cn-north-1 cn-northwest-1
DE: eu-central-1 europe-west10 europe-west3 germanynorth germanywestcentral
ES: eu-south-2 europe-southwest1 spaincentral
FI: europe-north1
FR: eu-west-3 europe-west9 francecentral francesouth
GB: eu-west-2 europe-west2 uksouth ukwest
HK: ap-east-1 asia-east2 eastasia
ID: ap-southeast-3 asia-southeast2 indonesiacentral
IE: eu-west-1 northeurope
IL: il-central-1 israelcentral me-west1
IN: ap-south-1 ap-south-2 asia-south1 asia-south2 centralindia jioindiacentral jioindiawest
    southindia westindia
IT: eu-south-1 europe-west12 europe-west8 italynorth
JP: ap-northeast-1 ap-northeast-3 asia-northeast1 asia-northeast2 japaneast japanwest
KR: ap-northeast-2 asia-northeast3 koreacentral koreasouth
MX: mexicocentral mx-central-1 northamerica-south1
MY: ap-southeast-5 malaysiawest
NL: europe-west4 westeurope
NO: norwayeast norwaywest
NZ: newzealandnorth
PL: europe-central2 polandcentral
QA: me-central1 qatarcentral
SA: me-central2
SE: eu-north-1 swedencentral swedensouth
SG: ap-southeast-1 asia-southeast1 southeastasia southeastasiastandard
TH: ap-southeast-7
TW: ap-east-2 asia-east1 taiwannorth
US: centralus eastus eastus2 northcentralus southcentralus us-central1 us-east-1 us-east-2 us-east1
    us-east4 us-east5 us-gov-east-1 us-gov-west-1 us-south1 us-west-1 us-west-2 us-west1 us-west2
    us-west3 us-west4 westus westus2 westus3
ZA: af-south-1 africa-south1 southafricanorth southafricawest
"""
"""A country, a colon, its regions; a line that starts with blank space goes on with the country above."""


def _by_country(table: str) -> dict[str, frozenset[str]]:
    entries = (entry.split(":") for entry in table.replace("\n   ", "").strip().split("\n"))
    return {country: frozenset(regions.split()) for country, regions in entries}


EU = frozenset(_EU.split())
EEA = EU | {"IS", "LI", "NO"}
COUNTRIES = frozenset(_COUNTRIES.split())
"""ISO 3166-1 alpha-2 codes."""

REGIONS_BY_COUNTRY = _by_country(_REGIONS)
COUNTRY_BY_REGION = {region: country for country, regions in REGIONS_BY_COUNTRY.items() for region in regions}
