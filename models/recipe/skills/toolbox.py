"""The families of tools: what each does, ways to name it, its arguments, ways to ask for it."""

from collections.abc import Callable
from dataclasses import dataclass

from models.recipe import words
from models.recipe.names import Names

Maker = Callable[[Names], str | int]


@dataclass(frozen=True)
class Argument:
    names: list[str]
    kind: str
    make: Maker


CITY = Argument(["city", "location", "place", "town"], "string", lambda n: n.place())
PERSON = Argument(["name", "person", "user", "contact"], "string", lambda n: n.person())
DAY = Argument(["day", "date"], "string", lambda n: n.pick(words.DAYS))
TIME = Argument(["time", "at", "start"], "string", lambda n: n.clock())
ITEM = Argument(
    ["item", "product", "article", "thing"],
    "string",
    lambda n: n.phrase(words.QUALITIES, words.THINGS),
)
COUNT = Argument(
    ["count", "quantity", "number", "amount"], "integer", lambda n: int(n.number(2, 999))
)
TOPIC = Argument(
    ["query", "topic", "text", "q"],
    "string",
    lambda n: n.pick((n.place(), n.phrase(words.QUALITIES, words.THINGS))),
)
TITLE = Argument(
    ["title", "song", "book", "film"],
    "string",
    lambda n: f"The {n.pick(words.QUALITIES).capitalize()} {n.word()}",
)
CODE = Argument(["id", "code", "reference", "order"], "string", lambda n: n.code())
FROM = Argument(["origin", "from", "start"], "string", lambda n: n.place())
TO = Argument(["destination", "to", "target", "end"], "string", lambda n: n.place())
COLOUR = Argument(["colour", "color"], "string", lambda n: n.pick(words.COLOURS))
PART = Argument(["device", "object", "part"], "string", lambda n: n.pick(words.PARTS))
A = Argument(["a", "x", "first", "left"], "integer", lambda n: int(n.number(2, 9999)))
B = Argument(["b", "y", "second", "right"], "integer", lambda n: int(n.number(2, 9999)))

# (names, descriptions, arguments, questions with {0}, {1}, ... for the arguments)
FAMILIES: list[tuple[list[str], list[str], list[Argument], list[str]]] = [
    (["get_weather", "weather", "current_weather", "get_current_weather", "forecast"],
     ["Get the weather in a city.", "Weather for a place."],
     [CITY],
     ["What is the weather in {0}?", "How is the weather in {0}?", "Is it raining in {0}?",
      "Tell me the weather for {0}."]),
    (["get_time", "current_time", "clock"],
     ["Get the local time of a place.", "Time in a city."],
     [CITY],
     ["What time is it in {0}?", "Tell me the time in {0}.", "What is the local time in {0}?"]),
    (["search", "search_web", "find_documents", "lookup"],
     ["Search for documents.", "Search the web."],
     [TOPIC],
     ["Search for {0}.", "Look up {0}.", "Find something about {0}.", "Search {0} for me."]),
    (["add", "sum", "add_numbers"],
     ["Add two numbers."],
     [A, B],
     ["What is {0} plus {1}?", "Add {0} and {1}.", "How much is {0} + {1}?",
      "Compute {0} + {1}."]),
    (["multiply", "times", "product"],
     ["Multiply two numbers."],
     [A, B],
     ["What is {0} times {1}?", "Multiply {0} by {1}.", "How much is {0} * {1}?"]),
    (["send_message", "message", "send_text", "notify"],
     ["Send a message to a person."],
     [PERSON, TOPIC],
     ["Send {0} a message about {1}.", "Write to {0} about {1}.", "Tell {0} about {1}."]),
    (["call", "phone", "make_call", "dial"],
     ["Call a person."],
     [PERSON],
     ["Call {0}.", "Please phone {0}.", "Give {0} a call."]),
    (["book_table", "reserve_table", "reserve"],
     ["Reserve a table."],
     [COUNT, DAY],
     ["Book a table for {0} on {1}.", "Reserve a table for {0} people on {1}."]),
    (["set_alarm", "alarm", "wake_me"],
     ["Set an alarm."],
     [TIME],
     ["Wake me at {0}.", "Set an alarm for {0}.", "I must get up at {0}."]),
    (["set_timer", "timer", "start_timer"],
     ["Start a timer of some minutes."],
     [COUNT],
     ["Set a timer for {0} minutes.", "Start a timer of {0} minutes."]),
    (["order_item", "order", "buy", "purchase"],
     ["Order an item."],
     [ITEM, COUNT],
     ["Order {1} {0}.", "Buy {1} {0}.", "I want {1} {0}.", "Please order {1} of the {0}."]),
    (["check_stock", "stock", "inventory"],
     ["How many of an item are in stock."],
     [ITEM],
     ["Do we have {0} in stock?", "How many {0} are in stock?", "Check the stock of {0}."]),
    (["get_price", "price", "price_of"],
     ["Get the price of an item."],
     [ITEM],
     ["How much do {0} cost?", "What is the price of {0}?", "Get the price of {0}."]),
    (["play_music", "play", "play_song"],
     ["Play a song."],
     [TITLE],
     ["Play {0}.", "I want to hear {0}.", "Put on {0}."]),
    (["find_book", "book_search", "get_book"],
     ["Find a book by title."],
     [TITLE],
     ["Find the book {0}.", "Do you have the book {0}?", "Where is the book {0}?"]),
    (["track_order", "order_status", "track"],
     ["Status of an order."],
     [CODE],
     ["Where is my order {0}?", "Track order {0}.", "What is the status of order {0}?"]),
    (["cancel_order", "cancel", "cancel_booking"],
     ["Cancel an order or a booking."],
     [CODE],
     ["Cancel order {0}.", "Please cancel {0}.", "I no longer want order {0}."]),
    (["find_route", "route", "directions", "get_directions"],
     ["Find the way between two places."],
     [FROM, TO],
     ["How do I get from {0} to {1}?", "Find a route from {0} to {1}.",
      "Show me the way from {0} to {1}."]),
    (["book_ticket", "buy_ticket", "book_train"],
     ["Book a ticket to a place on a day."],
     [TO, DAY],
     ["Book a ticket to {0} for {1}.", "I need a ticket to {0} on {1}.",
      "Get me a ticket to {0} on {1}."]),
    (["add_contact", "create_user", "register"],
     ["Add a person."],
     [PERSON],
     ["Add {0} to my contacts.", "Register {0}.", "Create an entry for {0}."]),
    (["get_user", "find_person", "lookup_user"],
     ["Find a person."],
     [PERSON],
     ["Find the person {0}.", "Who is {0} in our list?", "Look up the user {0}."]),
    (["schedule_meeting", "create_event", "add_event"],
     ["Plan a meeting with a person on a day at a time."],
     [PERSON, DAY, TIME],
     ["Plan a meeting with {0} on {1} at {2}.", "Schedule a meeting with {0} on {1} at {2}.",
      "Meet {0} on {1} at {2}."]),
    (["paint", "set_colour", "set_color"],
     ["Set the colour of an object."],
     [PART, COLOUR],
     ["Paint the {0} {1}.", "Make the {0} {1}.", "Set the {0} to {1}."]),
    (["turn_on", "switch_on", "activate"],
     ["Turn a device on."],
     [PART],
     ["Turn on the {0}.", "Switch the {0} on.", "Activate the {0}."]),
    (["get_population", "population"],
     ["Number of people of a place."],
     [CITY],
     ["How many people live in {0}?", "What is the population of {0}?"]),
    (["translate", "translate_text"],
     ["Translate a text."],
     [TOPIC],
     ["Translate {0}.", "How do you translate {0}?", "Please translate {0}."]),
]  # fmt: skip
