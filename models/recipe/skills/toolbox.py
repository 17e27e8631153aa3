"""The families of tools: what each does, ways to name it, its arguments, ways to ask for it."""

from dataclasses import dataclass

from models.recipe.names import Names


@dataclass(frozen=True)
class Argument:
    """One of a tool. `kinds` are kinds of the bank's values, of which each call takes one."""

    names: list[str]
    kinds: list[str]
    whole: bool = False  # an integer

    @property
    def type(self) -> str:
        """Its JSON type."""
        return "integer" if self.whole else "string"

    def value(self, names: Names) -> str | int:
        """A value for a call."""
        if self.whole:
            return int(names.number(2, names.rng.choice((20, 99, 999, 9999))))
        return names.of(names.rng.choice(self.kinds))


@dataclass(frozen=True)
class Family:
    """Tools that do the same. The questions hold {0}, {1}, … for the arguments."""

    names: list[str]
    descriptions: list[str]
    arguments: list[Argument]
    questions: list[str]


CITY = Argument(["city", "location", "place", "town"], ["town"])
PERSON = Argument(["name", "person", "user", "contact", "to"], ["person", "first"])
DAY = Argument(["day", "date", "when"], ["weekday", "day", "date"])
TIME = Argument(["time", "at", "start", "hour"], ["time"])
ITEM = Argument(["item", "product", "article", "thing"], ["product", "instrument", "drink", "food"])
COUNT = Argument(["count", "quantity", "number", "amount"], [], whole=True)
TOPIC = Argument(["query", "topic", "text", "q"], ["subject", "hobby", "book", "town"])
TITLE = Argument(["title", "song", "book", "film"], ["book"])
CODE = Argument(["id", "code", "reference", "order"], ["code"])
FROM = Argument(["origin", "from", "start"], ["town", "place"])
TO = Argument(["destination", "to", "target", "end"], ["town", "place"])
COLOUR = Argument(["colour", "color"], ["colour"])
ROOM = Argument(["room", "area", "where"], ["room"])
A = Argument(["a", "x", "first", "left"], [], whole=True)
B = Argument(["b", "y", "second", "right"], [], whole=True)
MONEY = Argument(["amount", "sum", "price"], ["money"])
COMPANY = Argument(["company", "firm", "name"], ["company"])
LANGUAGE = Argument(["language", "lang", "target"], ["language"])
FILE = Argument(["file", "path", "name"], ["file"])
EMAIL = Argument(["email", "address", "to"], ["email"])
COUNTRY = Argument(["country", "nation", "where"], ["country"])
DURATION = Argument(["duration", "length", "time"], ["duration"])
TEAM = Argument(["team", "club", "side"], ["team"])
PLANT = Argument(["plant", "flower", "species"], ["plant"])
URL = Argument(["url", "link", "page"], ["url"])

FAMILIES = [
    Family(["get_weather", "weather", "current_weather", "forecast"],
           ["Get the weather in a city.", "Weather for a place."], [CITY],
           ["What is the weather in {0}?", "How is the weather in {0}?", "Is it raining in {0}?",
            "Do I need an umbrella in {0}?", "weather {0}"]),
    Family(["get_time", "current_time", "clock"],
           ["Get the local time of a place.", "Time in a city."], [CITY],
           ["What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"]),
    Family(["search", "search_web", "find_documents", "lookup"],
           ["Search for documents.", "Search the web."], [TOPIC],
           ["Search for {0}.", "Look up {0}.", "Find something about {0}.",
            "What is known about {0}?"]),
    Family(["add", "sum", "add_numbers"], ["Add two numbers."], [A, B],
           ["What is {0} plus {1}?", "Add {0} and {1}.", "How much is {0} + {1}?", "{0} + {1}"]),
    Family(["multiply", "times", "product"], ["Multiply two numbers."], [A, B],
           ["What is {0} times {1}?", "Multiply {0} by {1}.", "How much is {0} * {1}?"]),
    Family(["send_message", "message", "send_text", "notify"],
           ["Send a message to a person."], [PERSON, TOPIC],
           ["Send {0} a message about {1}.", "Write to {0} about {1}.", "Let {0} know about {1}."]),
    Family(["call", "phone", "make_call", "dial"], ["Call a person."], [PERSON],
           ["Call {0}.", "Please phone {0}.", "Give {0} a call.", "I want to speak to {0}."]),
    Family(["book_table", "reserve_table", "reserve"], ["Reserve a table."], [COUNT, DAY],
           ["Book a table for {0} on {1}.", "Reserve a table for {0} people on {1}.",
            "We are {0} and would like to eat on {1}."]),
    Family(["set_alarm", "alarm", "wake_me"], ["Set an alarm."], [TIME],
           ["Wake me at {0}.", "Set an alarm for {0}.", "I must get up at {0}."]),
    Family(["set_timer", "timer", "start_timer"], ["Start a timer."], [DURATION],
           ["Set a timer for {0}.", "Start a timer of {0}.", "Tell me when {0} are over."]),
    Family(["order_item", "order", "buy", "purchase"], ["Order an item."], [ITEM, COUNT],
           ["Order {1} of {0}.", "Buy {1} x {0}.", "I want {1} times {0}.",
            "{0}, {1} of them, please."]),
    Family(["check_stock", "stock", "inventory"], ["How many of an item are in stock."], [ITEM],
           ["Do we have {0} in stock?", "How much {0} is left?", "Check the stock of {0}."]),
    Family(["get_price", "price", "price_of"], ["Get the price of an item."], [ITEM],
           ["How much is {0}?", "What is the price of {0}?", "What does {0} cost?"]),
    Family(["play_music", "play", "play_song"], ["Play a song."], [TITLE],
           ["Play {0}.", "I want to hear {0}.", "Put on {0}."]),
    Family(["find_book", "book_search", "get_book"], ["Find a book by title."], [TITLE],
           ["Find the book {0}.", "Do you have {0}?", "I'd like to read {0}."]),
    Family(["track_order", "order_status", "track"], ["Status of an order."], [CODE],
           ["Where is my order {0}?", "Track order {0}.", "What is the status of {0}?"]),
    Family(["cancel_order", "cancel", "cancel_booking"], ["Cancel an order or a booking."], [CODE],
           ["Cancel order {0}.", "Please cancel {0}.", "I no longer want {0}."]),
    Family(["find_route", "route", "directions", "get_directions"],
           ["Find the way between two places."], [FROM, TO],
           ["How do I get from {0} to {1}?", "Find a route from {0} to {1}.",
            "I am in {0} and want to go to {1}."]),
    Family(["book_ticket", "buy_ticket", "book_train"], ["Book a ticket to a place on a day."],
           [TO, DAY],
           ["Book a ticket to {0} for {1}.", "I need a ticket to {0} on {1}.",
            "On {1} I travel to {0}."]),
    Family(["add_contact", "create_user", "register"], ["Add a person."], [PERSON],
           ["Add {0} to my contacts.", "Register {0}.", "Create an entry for {0}."]),
    Family(["get_user", "find_person", "lookup_user"], ["Find a person."], [PERSON],
           ["Find the person {0}.", "Who is {0} in our list?", "Look up the user {0}."]),
    Family(["schedule_meeting", "create_event", "add_event"],
           ["Plan a meeting with a person on a day at a time."], [PERSON, DAY, TIME],
           ["Plan a meeting with {0} on {1} at {2}.", "Meet {0} on {1} at {2}.",
            "At {2} on {1} I see {0}; put it down."]),
    Family(["paint", "set_colour", "set_color"], ["Set the colour of a room."], [ROOM, COLOUR],
           ["Paint the {0} {1}.", "Make the {0} {1}.", "I want {1} for the {0}."]),
    Family(["turn_on", "switch_on", "lights_on"], ["Turn on the light in a room."], [ROOM],
           ["Turn on the light in the {0}.", "It is dark in the {0}.",
            "Light in the {0}, please."]),
    Family(["get_population", "population"], ["Number of people of a place."], [CITY],
           ["How many people live in {0}?", "What is the population of {0}?", "How big is {0}?"]),
    Family(["translate", "translate_text"], ["Translate a text."], [TOPIC, LANGUAGE],
           ["Translate {0} into {1}.", "What is {0} in {1}?", "Say {0} in {1}."]),
    Family(["pay", "transfer", "send_money"], ["Send money to a person."], [PERSON, MONEY],
           ["Send {0} {1}.", "Pay {1} to {0}.", "I owe {0} {1}, please settle it."]),
    Family(["company_info", "find_company"], ["Information on a company."], [COMPANY],
           ["What does {0} do?", "Tell me about the firm {0}.", "Look up the company {0}."]),
    Family(["open_file", "read_file", "show_file"], ["Open a file."], [FILE],
           ["Open {0}.", "Show me {0}.", "What is in {0}?"]),
    Family(["send_email", "email", "mail"], ["Send an e-mail."], [EMAIL, TOPIC],
           ["Mail {0} about {1}.", "Send an e-mail to {0} on {1}.", "Write {0} something on {1}."]),
    Family(["capital_of", "get_capital"], ["The capital of a country."], [COUNTRY],
           ["What is the capital of {0}?", "Which town governs {0}?", "Capital of {0}?"]),
    Family(["match_result", "score", "last_result"], ["The last result of a team."], [TEAM],
           ["How did {0} play?", "Did {0} win?", "What was the score of {0}?"]),
    Family(["plant_care", "care_for"], ["How to look after a plant."], [PLANT],
           ["How often do I water {0}?", "How do I look after {0}?", "My {0} looks sad."]),
    Family(["fetch_page", "open_url", "browse"], ["Open a page."], [URL],
           ["Open {0}.", "What does {0} say?", "Go to {0}."]),
    Family(["remind", "add_reminder", "reminder"], ["Remind the user of something on a day."],
           [TOPIC, DAY],
           ["Remind me of {0} on {1}.", "On {1}, remind me of {0}.",
            "Don't let me forget {0} on {1}."]),
    Family(["convert_currency", "exchange"], ["Convert an amount into another currency."],
           [MONEY, COUNTRY],
           ["How much is {0} in the money of {1}?", "Convert {0} to the currency of {1}."]),
    Family(["book_hotel", "reserve_room", "hotel"], ["Book a room in a town."], [CITY, DAY],
           ["Book a hotel in {0} for {1}.", "I need a room in {0} on {1}.",
            "Find me a bed in {0} on {1}."]),
    Family(["find_flight", "flights", "search_flights"], ["Find flights between two places."],
           [FROM, TO],
           ["Find a flight from {0} to {1}.", "Which flights go from {0} to {1}?",
            "I want to fly from {0} to {1}."]),
    Family(["set_temperature", "heating", "thermostat"], ["Set the temperature of a room."],
           [ROOM, Argument(["degrees", "temperature", "level"], [], whole=True)],
           ["Set the {0} to {1} degrees.", "Make it {1} degrees in the {0}.",
            "Heat the {0} to {1}."]),
    Family(["add_to_list", "shopping_list", "add_item"], ["Put an item on the shopping list."],
           [ITEM],
           ["Put {0} on the shopping list.", "We need {0}.", "Add {0} to my list."]),
    Family(["open_ticket", "report_problem", "create_ticket"], ["Report a problem."],
           [Argument(["subject", "problem", "summary"], ["product", "vehicle", "instrument"])],
           ["The {0} is broken.", "Open a ticket about the {0}.", "Something is wrong with {0}."]),
    Family(["share_file", "send_file"], ["Share a file with a person."], [FILE, PERSON],
           ["Share {0} with {1}.", "Send {0} to {1}.", "Let {1} see {0}."]),
    Family(["delete_file", "remove_file"], ["Delete a file."], [FILE],
           ["Delete {0}.", "Remove the file {0}.", "Get rid of {0}."]),
]  # fmt: skip

# Families by the first of their names, and others whose requests a tool of them could serve, too:
# where it is offered, these are not declined.
_TELLING = (
    "get_weather", "get_time", "get_price", "check_stock", "find_book", "find_route", "get_user",
    "get_population", "company_info", "capital_of", "match_result", "plant_care", "fetch_page",
    "find_flight", "translate", "convert_currency", "track_order",
)  # fmt: skip
SERVES = {
    "search": _TELLING, "fetch_page": ("search",), "order_item": ("add_to_list", "book_ticket"),
    "add_to_list": ("order_item",), "book_ticket": ("find_flight",),
    "find_flight": ("book_ticket", "find_route"), "find_route": ("find_flight", "book_ticket"),
    "send_message": ("call", "remind"), "send_email": ("share_file",), "remind": ("set_alarm",),
    "set_alarm": ("remind", "set_timer"), "set_timer": ("set_alarm",), "get_user": ("search",),
    "company_info": ("search",), "schedule_meeting": ("remind",), "find_book": ("search",),
}  # fmt: skip
