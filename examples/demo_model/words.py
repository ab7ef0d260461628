"""Word lists of the demo data. Their order is part of the data hash."""

from __future__ import annotations

import random

ANIMALS = """fox bear cat dog mouse rabbit owl frog duck horse wolf lion tiger sheep goat cow pig
hen goose swan crow eagle robin sparrow turtle snake lizard fish whale dolphin seal otter beaver
badger hedgehog squirrel deer moose camel donkey monkey elephant giraffe zebra penguin parrot bee
ant spider snail crab""".split()

FOODS = """apple banana cherry lemon orange pear plum grape melon mango peach carrot potato tomato
onion garlic pepper cabbage lettuce spinach pumpkin bean rice bread butter cheese honey sugar salt
soup pasta pizza salad cake cookie pancake yogurt milk water coffee tea juice egg nut olive
chocolate muffin sandwich noodle""".split()

OBJECTS = """table chair lamp window door carpet mirror clock basket bottle bucket candle hammer
ladder needle button ribbon pencil paper notebook book letter envelope stamp ticket wallet key lock
ring crown coin drum guitar piano violin trumpet whistle bell ball kite puzzle doll train bicycle
engine wheel rocket boat anchor sail tent blanket pillow towel sweater jacket hat scarf glove shoe
spoon fork knife plate bowl cup kettle oven camera radio phone computer keyboard screen printer
battery lantern compass map flag statue""".split()

PLACES = """forest village garden river mountain castle meadow island valley harbor desert market
library school kitchen barn bridge cave lake tower""".split()

NATURE = """sun moon star cloud rain snow wind storm thunder rainbow leaf tree branch root flower
grass seed stone rock sand hill ocean beach wave coast field path road street city country planet
earth fire smoke ice summer winter spring autumn morning evening night""".split()

ADJECTIVES = """small big quiet loud happy sad brave shy clever gentle kind quick slow bright dark
warm cold soft hard round flat heavy light clean empty full fresh golden green blue red yellow
purple white black brown grey pink silver old young new early late strong weak tall short long wide
narrow deep simple strange famous honest polite proud calm busy lazy hungry thirsty tired""".split()

VERBS = """walk run jump swim fly climb dance sing laugh smile cry sleep dream wake eat drink cook
bake read write draw paint build break carry catch throw push pull open close find lose buy sell
give take bring send call ask answer teach learn study think know forget remember listen watch
travel drive ride sail work play rest wait help follow lead grow plant pick cut wash dry""".split()

OTHER = """question number word sentence story teacher student doctor farmer baker sailor painter
writer singer driver king queen prince friend brother sister mother father child family neighbor
visitor hour minute second week month year today tomorrow yesterday always never often soon again
above below between behind inside outside around together music picture science history nature
machine model token memory cache server python language weather holiday birthday party present
secret treasure adventure journey promise wonder silence shadow corner circle square triangle
problem reason result example method system project signal pattern network program weekend
hospital station airport museum theater restaurant factory office bakery bedroom bathroom ceiling
chimney fountain pocket finger shoulder stomach elbow knee""".split()

NAMES = """Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karla Leo Mia Noah Olivia Paul Rosa
Simon Tina Victor Wendy Adam Bella Carlos Diana Erik Fiona George Helen Ivan Julia Kevin Laura
Martin Nina Oscar Petra Robert Sara Thomas Alice Bruno Cecilia Daniel Elena Frank Maria Peter Lucy
Max""".split()

COMMON = """about after age all alphabet answer anything apples are ascending asked assistant away
back backwards balloon best birds boxes brief briefly called can capital capitals careful cent
centimeters cents chat chatbot chemical children city color come comes continent convert cost count
curious descending did digits does dollars double down dozens else end english euro euros even event
every everyone exactly examples expert extract feet following for found four friendly friends from
gold good grams half has have hear helpful homework honest house how inches into item keep kilograms
kilometers large larger largest legs less letters like list lists liters little live lived lives
looked many may meet meters million milliliters millimeters minus minutes months more much multiply
name names near need nice not numbers odd one opposite order owner parameters past pieces place
please plural plus price quantity questions radix repeat reverse safe say seconds sent share she
shiny show six slept smaller smallest sort spell spelled spoken stat still stories subtract sum
surprised symbol talked tell ten tense text than thank thanks that the their them there these they
this three time times tons too trained twice two under units until upon user very want wanted was
welcome well went were what when which who with wooden words works written years you your
actually change calculate compute concert copy echo goodbye hello here himself use range return
should could would action nation simple apple people able age ending string hard yard stand
hunger danger finger power tower inner outer upper lower order border""".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

MONTHS = """January February March April May June July August September October November
December""".split()

WORDS = sorted({*ANIMALS, *FOODS, *OBJECTS, *PLACES, *NATURE, *ADJECTIVES, *VERBS, *OTHER, *COMMON})

_ONSETS = """b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl sm sn sp
st str t th tr tw v w wh y z""".split()
_VOWELS = "a e i o u a e i o u ai ea ee ie oa oo ou ay".split()
_CODAS = [
    "",
    "",
    "",
    "",
    *"b ck d ff g l ll m n nd ng nk nt p r rd rm rn rt s ss st t x sh th".split(),
]


def made_up_word(rng: random.Random, low: int = 1, high: int = 3) -> str:
    """A pronounceable word of low..high syllables that need not exist."""
    parts = []
    for _ in range(rng.randrange(low, high + 1)):
        parts.append(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS))
    return "".join(parts)[:12]


def any_word(rng: random.Random) -> str:
    """Mostly a listed word, sometimes a made-up one or a string of letters."""
    dice = rng.random()
    if dice < 0.6:
        return rng.choice(WORDS)
    if dice < 0.93:
        return made_up_word(rng)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(3, 8)))


def any_name(rng: random.Random) -> str:
    """A first name, listed or made up."""
    return rng.choice(NAMES) if rng.random() < 0.6 else made_up_word(rng, 1, 2).capitalize()
