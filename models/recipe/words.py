"""The fixed English words of the short tasks and the stories."""


def listed(text: str) -> list[str]:
    """The words of a text; or its phrases, where bars part them."""
    if "|" in text:
        return [" ".join(phrase.split()) for phrase in text.split("|")]
    return text.split()


DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = listed(
    """
    January February March April May June July August September October November December
    """
)

SEASONS = ["spring", "summer", "autumn", "winter"]

COLOURS = listed(
    """
    red blue green yellow white black grey orange purple pink brown silver golden crimson
    turquoise violet cream scarlet teal amber ivory navy
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

PARTS = listed(
    """
    door roof flag gate tower front wall sign lamp boat curtain floor ceiling railing clock
    fence uniform hat coat bell bus engine hull sail lantern carpet window frame
    """
)

ANIMALS = listed(
    """
    cat dog horse donkey parrot goat owl goose mule pony sheepdog raven tortoise mascot
    robot tugboat boat bell engine ship
    """
)

JOBS = listed(
    """
    baker | teacher | nurse | sailor | painter | carpenter | farmer | engineer | librarian |
    cook | pilot | gardener | tailor | doctor | poet | singer | clockmaker | potter |
    fisherman | shepherd | builder | printer | lawyer | miner | smith | dancer | driver |
    weaver | astronomer | ferry captain | violin maker | map maker | bee keeper |
    lighthouse keeper | ship builder | glass blower | book binder
    """
)

ANY_ADJECTIVE = listed(
    """
    quiet old small busy lovely cold warm bright famous narrow steep windy grey pleasant
    simple
    """
)
