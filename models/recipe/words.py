"""The fixed English words that the corpus is made of."""


def listed(text: str) -> list[str]:
    """The words of a text; or its phrases, where bars part them."""
    if "|" in text:
        return [" ".join(phrase.split()) for phrase in text.split("|")]
    return text.split()


KINDS = listed(
    """
    lighthouse | ferry | orchard | mill | museum | library | bridge | tower | harbour | inn |
    school | theatre | garden | bakery | market | station | observatory | castle | farm |
    chapel | hall | abbey | brewery | dairy | foundry | workshop | windmill | quarry | mine |
    reservoir | canal | railway | tramway | hospital | clinic | college | academy | gallery |
    archive | zoo | aquarium | park | lodge | hotel | cafe | pottery | forge | vineyard |
    nursery | cinema | arena | stadium | pier | dock | shipyard | airfield | warehouse |
    depot | press | studio | laboratory | institute | club | society | choir | orchestra |
    company | cooperative | bookshop | teahouse | watermill | boathouse | greenhouse |
    fountain | square | greenway | lock | weir | beacon | ferry line | tea garden | bus line |
    post office | bell tower | town hall
    """
)

SETTLEMENTS = listed("town village island city hamlet port valley river lake district")

ROLES = listed(
    """
    keeper | captain | harbour master | head gardener | librarian | director | mayor | owner |
    manager | baker | miller | chief engineer | curator | head teacher | conductor |
    station master | ferryman | pilot | doctor | head nurse | cook | innkeeper | founder |
    warden | gatekeeper | bell ringer | clockmaker | treasurer | secretary | president |
    chair | head brewer | foreman | shepherd | beekeeper | night watchman | caretaker |
    archivist | astronomer | chief scientist | head chef | organist | choir leader | ranger |
    coach | chief clerk | postmaster | cellar master | master potter | smith | stage manager |
    head of research | guide | vet | trainer | lock keeper | signalman | first mate |
    boatswain | deputy mayor | constable | abbot | judge | head of school | editor | printer |
    bookkeeper | head porter | housekeeper | steward | chief pilot | superintendent |
    governor | prefect | head forester | inspector | carpenter | weaver | orchard manager |
    cider maker | cheesemaker | chief designer | lead builder | head of kitchen
    """
)

EVENTS = [  # past form, question, key
    ("opened", "did {E} open", "opened"),
    ("was built", "was {E} built", "built"),
    ("was founded", "was {E} founded", "founded"),
    ("closed", "did {E} close", "closed"),
    ("was rebuilt", "was {E} rebuilt", "rebuilt"),
    ("was restored", "was {E} restored", "restored"),
    ("was completed", "was {E} completed", "completed"),
    ("was established", "was {E} established", "established"),
    ("burned down", "did {E} burn down", "burned_down"),
    ("was sold", "was {E} sold", "sold"),
    ("was first mapped", "was {E} first mapped", "mapped"),
    ("was renamed", "was {E} renamed", "renamed"),
    ("was repaired", "was {E} repaired", "repaired"),
    ("won its first prize", "did {E} win its first prize", "first_prize"),
    ("began", "did {E} begin", "began"),
    ("started", "did {E} start", "started"),
    ("got electric light", "did {E} get electric light", "electric_light"),
    ("was first lit", "was {E} first lit", "first_lit"),
    ("was planted", "was {E} planted", "planted"),
    ("joined the union", "did {E} join the union", "joined"),
    ("was flooded", "was {E} flooded", "flooded"),
    ("moved to its present site", "did {E} move to its present site", "moved"),
    ("was enlarged", "was {E} enlarged", "enlarged"),
]

MAKERS = [  # past participle, past, key
    ("designed", "designed", "designer"),
    ("built", "built", "builder"),
    ("founded", "founded", "founder"),
    ("painted", "painted", "painter"),
    ("restored", "restored", "restorer"),
    ("planted", "planted", "planter"),
    ("paid for", "paid for", "sponsor"),
    ("discovered", "discovered", "discoverer"),
    ("named", "named", "namer"),
    ("opened", "opened", "opener"),
    ("planned", "planned", "planner"),
    ("bought", "bought", "buyer"),
    ("mapped", "mapped", "mapper"),
    ("started", "started", "starter"),
    ("drawn", "drew", "artist"),
    ("created", "created", "creator"),
    ("run", "ran", "operator"),
    ("owned", "owned", "owner"),
]

COUNTED = listed(
    """
    rooms | boats | trees | steps | windows | bells | benches | books | seats | ovens |
    members | pupils | cows | bridges | houses | inhabitants | lamps | towers | gates |
    stalls | beds | workers | wheels | paintings | telescopes | ponds | horses | beehives |
    carriages | stops | ships | floors | doors | cats | islands | shops | fountains |
    statues | barrels | looms | kilns | rows | sheep | goats | volunteers | nurses | tables |
    chimneys | arches | wells | stations | passengers | cabins | crew members | apple trees |
    rare books | guest rooms | paths
    """
)

MEASURES = [
    ("tall", "height"),
    ("high", "height"),
    ("long", "length"),
    ("deep", "depth"),
    ("wide", "width"),
]
UNITS = ["metres", "feet", "kilometres", "miles", "paces"]

WARES = listed(
    """
    ticket | cup of tea | loaf of bread | day pass | guided tour | bowl of soup | map |
    return ticket | night's stay | jar of honey | season ticket | basket of apples | lesson |
    crossing | child ticket | room | boat trip | bottle of cider | poster | postcard |
    bag of flour | pot of jam | slice of cake | single fare | family ticket | membership |
    seat | visit | workshop | parking space
    """
)
CURRENCIES = [
    "crowns",
    "dollars",
    "pounds",
    "euros",
    "coins",
    "shillings",
    "pence",
    "florins",
    "marks",
]

COLOURS = listed(
    """
    red blue green yellow white black grey orange purple pink brown silver golden crimson
    turquoise violet cream scarlet teal amber ivory navy
    """
)
PARTS = listed(
    """
    door roof flag gate tower front wall sign lamp boat curtain floor ceiling railing clock
    fence uniform hat coat bell bus engine hull sail lantern carpet window frame
    """
)
MATERIALS = listed(
    """
    granite oak brick marble steel glass slate copper sandstone iron pine limestone concrete
    cedar bronze clay
    """
)
THINGS = listed(
    """
    pears apples bread bells cheese roses honey candles plums boats carpets kites lamps
    potatoes cherries cider wool soap tiles jars clocks maps paper tea melons beans tulips
    ropes baskets shoes hats salt barrels violins drums whistles pies cakes cups bowls
    flutes quilts lanterns knives ink marbles herbs walnuts mustard
    """
)
QUALITIES = listed(
    """
    blue red golden sweet wild smoked dark white striped wooden paper hand-made silver
    winter sour painted early large tiny spiced dried green round glass heavy black soft
    salted fresh old late
    """
)
PRODUCE = [
    ("grows", "grow"),
    ("makes", "make"),
    ("sells", "sell"),
    ("produces", "produce"),
    ("exports", "export"),
    ("collects", "collect"),
    ("serves", "serve"),
    ("stores", "store"),
    ("ships", "ship"),
    ("repairs", "repair"),
]

ANIMALS = listed(
    """
    cat dog horse donkey parrot goat owl goose mule pony sheepdog raven tortoise mascot
    robot tugboat boat bell engine ship
    """
)
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed(
    """
    January February March April May June July August September October November December
    """
)
GATHERINGS = listed(
    """
    market | concert | festival | fair | regatta | open day | harvest feast | boat race |
    meeting | auction | parade | dance | book sale | flower show | play | tasting |
    lantern walk | race | cleaning | choir practice | exhibition | apple day | kite contest
    """
)
CODES = [
    "door code",
    "phone number",
    "call sign",
    "postcode",
    "gate code",
    "catalogue number",
    "password",
    "registration",
    "radio frequency",
    "locker number",
    "badge number",
    "order number",
    "flight number",
    "serial number",
]
ATTRIBUTES = listed(
    """
    former name | nearest town | sister town | river | nearest island | main street |
    old name | nearest village | home port | local newspaper | parish | twin city |
    nearest station | terminus | first stop | last stop | biggest rival | parent company |
    patron | neighbour | official poet | hill | bay | supplier | nickname | best boat |
    oldest ship | flagship | capital | main port
    """
)
PREPOSITIONS = [
    "in",
    "near",
    "on the edge of",
    "beside",
    "above",
    "outside",
    "close to",
    "south of",
    "north of",
    "at",
    "on",
    "west of",
    "east of",
    "opposite",
    "behind",
]
JOBS = listed(
    """
    baker | teacher | nurse | sailor | painter | carpenter | farmer | engineer | librarian |
    cook | pilot | gardener | tailor | doctor | poet | singer | clockmaker | potter |
    fisherman | shepherd | builder | printer | lawyer | miner | smith | dancer | driver |
    weaver | astronomer | ferry captain | violin maker | map maker | bee keeper |
    lighthouse keeper | ship builder | glass blower | book binder
    """
)
HOBBIES = listed(
    """
    chess sailing painting running cooking gardening singing rowing fishing climbing reading
    dancing skating cycling knitting swimming carving archery fencing pottery juggling
    baking birdwatching stargazing
    """
)
INSTRUMENTS = listed(
    """
    violin flute piano drum trumpet cello guitar harp organ clarinet oboe banjo accordion
    horn fiddle
    """
)
FOODS = listed(
    """
    soup pie cheese pancakes rice plums cake noodles porridge dumplings stew berries toast
    salad pudding figs mushrooms omelettes waffles chestnuts lentils peaches curry biscuits
    """
)
ANY_ADJECTIVE = listed(
    """
    quiet old small busy lovely cold warm bright famous narrow steep windy grey pleasant
    simple
    """
)
SEASONS = ["spring", "summer", "autumn", "winter"]
PETS = ["cat", "dog", "horse", "parrot", "goat", "pony", "boat", "rabbit"]
KIN = listed("sister brother mother father teacher friend cousin uncle aunt daughter son")
